"""The two streams of one client's model.

    scores = Phi G + balance * Psi P_k        Phi, Psi: two activated maps of the same features
    P_k    = (Psi'Psi + beta I)^-1 Psi' (Y_k - Phi_k G)

G, the primary stream, is shared; P_k, the refinement stream, is fitted by the client to what the primary gets wrong
on the client's own rows, and never leaves it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Normaliser
from apfl.models.file import Container, read, write
from apfl.models.undecided import undecided

__all__ = ["DualStream"]


@dataclass(frozen=True, eq=False)
class DualStream:
    """A client's model. Without a refinement it is the primary stream alone, as AFL or a new client has it."""

    primary_map: FeatureMap
    primary: Tensor  # G (d_P, c), float64
    refinement_map: FeatureMap | None = None
    refinement: Tensor | None = None  # P_k (d_R, c), float64
    balance: float = 0.0  # lambda
    normaliser: Normaliser = field(default_factory=Normaliser)
    class_names: Sequence[str] | None = None
    temperature: float | None = None  # of softmax(scores / temperature)
    prior: Tensor | None = None  # (c,), added to the scores: tau * log(p_k / p)

    kind = "dual-stream"

    def scores(self, features: Tensor) -> Tensor:
        """Phi G + balance * Psi P_k, plus the local prior where there is one, (n, c), float64."""
        return torch.cat([self._scores(rows) for rows in torch.split(features, 8192)])

    def _scores(self, features: Tensor) -> Tensor:
        z = self.normaliser(features)
        scores = self.primary_map(z).to(torch.float64) @ self.primary
        if self.refinement is not None and self.refinement_map is not None and self.balance:
            scores.add_(self.refinement_map(z).to(torch.float64) @ self.refinement, alpha=self.balance)
        return scores if self.prior is None else scores.add_(self.prior)

    def predict(self, features: Tensor) -> Tensor:
        """The index of the highest score, (n,); -1 if the row has no decision (see `apfl.models.undecided`)."""
        scores = self.scores(features)
        return scores.argmax(1).masked_fill(undecided(self, features, scores) > 0, -1)

    def container(self) -> Container:
        """The model as data."""
        tensors = {"primary": self.primary}
        settings: dict[str, Any] = {
            "primary_map": self.primary_map.spec(),
            "balance": self.balance,
            "normalise": self.normaliser.how,
            "class_names": None if self.class_names is None else list(self.class_names),
            "temperature": self.temperature,
        }
        if self.prior is not None:
            tensors["prior"] = self.prior
        if self.refinement is not None and self.refinement_map is not None:
            tensors["refinement"] = self.refinement
            settings["refinement_map"] = self.refinement_map.spec()
        if self.normaliser.mean is not None and self.normaliser.std is not None:
            tensors |= {"mean": self.normaliser.mean, "std": self.normaliser.std}
        return Container(self.kind, tensors, settings)

    @classmethod
    def from_container(cls, container: Container) -> DualStream:
        """The model back from data; its random maps are drawn again and checked by fingerprint."""
        with container.opened(cls.kind) as (tensors, settings):
            refinement_map = settings.get("refinement_map")
            model = cls(
                primary_map=FeatureMap.from_spec(settings["primary_map"]),
                primary=tensors["primary"],
                refinement_map=None if refinement_map is None else FeatureMap.from_spec(refinement_map),
                refinement=tensors.get("refinement"),
                balance=float(settings["balance"]),
                normaliser=Normaliser(settings["normalise"], tensors.get("mean"), tensors.get("std")),
                class_names=settings["class_names"],
                temperature=settings["temperature"],
                prior=tensors.get("prior"),
            )
        if model.primary.shape[0] != model.primary_map.width:
            raise InputError(
                f"the model contradicts itself: a primary stream of {model.primary.shape[0]} rows "
                f"for a map of width {model.primary_map.width}"
            )
        return model

    def save(self, path: str | Path) -> None:
        """Write the model as one self-contained safetensors file."""
        write(self.container(), path)

    @classmethod
    def load(cls, path: str | Path) -> DualStream:
        """Read a model that `save` (or `apfl run`, or `apfl export`) wrote."""
        return cls.from_container(read(path))
