"""A client's model of numbers or labels: linear in the standardised features, plus a kernel on landmarks.

    scores = b_k + z W_k + k(u, V) A_k        z the standardised features, u the same at one length

One matrix for each part, whatever models were averaged: each of them is a fit on some of these columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.normalise import Normaliser
from apfl.models.base import ClientModel, common_of
from apfl.models.file import Container

__all__ = ["AdditiveModel"]


@dataclass(frozen=True, eq=False)
class AdditiveModel(ClientModel):
    """A client's model, or with the shared part alone that of a new client."""

    intercept: Tensor  # b_k (c,), float64
    linear: Tensor  # W_k (l, c), float64
    normaliser: Normaliser  # standardise
    landmarks: LandmarkMap | None = None
    scaling: Normaliser | None = None  # columns: what the landmarks are compared with
    kernel: Tensor | None = None  # A_k (d, c), float64
    class_names: Sequence[str] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # whose model it is, of which features; see `file.about`

    kind = "additive"

    def __repr__(self) -> str:
        drawn = "" if self.landmarks is None else f"{self.landmarks.width} landmarks, "
        return f"AdditiveModel({len(self.linear)} features, {drawn}{self.linear.shape[1]} targets)"

    def _scores(self, features: Tensor) -> Tensor:
        """(n, c), float64."""
        rows = features.double()
        scores = torch.addmm(self.intercept, self.normaliser(rows), self.linear)
        if self.landmarks is not None and self.scaling is not None and self.kernel is not None:
            scores.addmm_(self.landmarks.kernel(self.scaling(rows)), self.kernel)
        return scores

    def container(self) -> Container:
        """The model as data."""
        tensors: dict[str, Tensor | None] = {"intercept": self.intercept, "linear": self.linear}
        settings: dict[str, Any] = {"fingerprint": None}
        if self.landmarks is not None and self.scaling is not None:
            tensors |= {"points": self.landmarks.packed(), "scale": self.landmarks.scale, "kernel": self.kernel}
            tensors |= {"scaling_mean": self.scaling.mean, "scaling_std": self.scaling.std}
            settings["fingerprint"] = self.landmarks.fingerprint
        return self._with_common(tensors, settings)

    @classmethod
    def from_container(cls, container: Container) -> Self:
        """The model back from data."""
        with container.opened(cls.kind) as (tensors, settings):
            landmarks, scaling = None, None
            if settings["fingerprint"] is not None:
                landmarks = LandmarkMap.unpacked(tensors["points"], tensors["scale"], len(tensors["kernel"]))
                scaling = Normaliser("columns", tensors["scaling_mean"], tensors["scaling_std"])
            model = cls(
                tensors["intercept"], tensors["linear"], landmarks=landmarks, scaling=scaling,
                kernel=tensors.get("kernel"), **common_of(container),
            )  # fmt: skip
            fingerprint = settings["fingerprint"]
        if landmarks is not None and landmarks.fingerprint != fingerprint:
            raise InputError("the model contradicts itself: its landmarks are not those it was made with")
        return model
