"""A client's model on the landmark map, folded into one matrix.

    scores = k(z, V) A_k + prior,        A_k = L'^-1 (G + balance P_k)

The same as the two streams on phi(z) = L^-1 k(V, z) (`apfl.maths.landmarks`), with one product for each row. The
landmarks V stand in the file: they were drawn once, and no other machine would draw the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from torch import Tensor

from apfl.errors import InputError
from apfl.maths.landmarks import LandmarkMap
from apfl.maths.normalise import Normaliser
from apfl.models.base import ClientModel, common_of
from apfl.models.file import Container

__all__ = ["LandmarkModel"]


@dataclass(frozen=True, eq=False)
class LandmarkModel(ClientModel):
    """A client's model, or with its primary stream alone that of a new client."""

    feature_map: LandmarkMap
    weights: Tensor  # A_k (d, c), float64
    normaliser: Normaliser = field(default_factory=Normaliser)
    class_names: Sequence[str] | None = None
    temperature: float | None = None  # of softmax(scores / temperature)
    prior: Tensor | None = None  # (c,), added to the scores: tau * log(p_k / p)
    about: Mapping[str, Any] = field(default_factory=dict)  # whose model it is, of which features; see `file.about`

    kind = "landmark-stream"

    def __repr__(self) -> str:
        return f"LandmarkModel({self.weights.shape[0]} landmarks, {self.weights.shape[1]} classes)"

    def _scores(self, features: Tensor) -> Tensor:
        """(n, c), float64: A holds L'^-1, which amplifies the rounding of a kernel in single precision."""
        scores = self.feature_map.kernel(self.normaliser(features).double()) @ self.weights
        return scores if self.prior is None else scores.add_(self.prior)

    def container(self) -> Container:
        """The model as data."""
        tensors = {
            "points": self.feature_map.packed(), "scale": self.feature_map.scale, "weights": self.weights,
            "prior": self.prior,
        }  # fmt: skip
        settings = {"fingerprint": self.feature_map.fingerprint, "temperature": self.temperature}
        return self._with_common(tensors, settings)

    @classmethod
    def from_container(cls, container: Container) -> Self:
        """The model back from data."""
        with container.opened(cls.kind) as (tensors, settings):
            model = cls(
                LandmarkMap.unpacked(tensors["points"], tensors["scale"], len(tensors["weights"])),
                tensors["weights"],
                temperature=settings["temperature"],
                prior=tensors.get("prior"),
                **common_of(container),
            )
            fingerprint = settings["fingerprint"]
        if model.feature_map.fingerprint != fingerprint:
            raise InputError("the model contradicts itself: its landmarks are not those it was made with")
        return model
