"""The two streams of one client's model.

    scores = Phi G + balance * Psi P_k        Phi, Psi: two activated maps of the same features
    P_k    = (Psi'Psi + beta I)^-1 Psi' (Y_k - Phi_k G)

G, the primary stream, is shared; P_k, the refinement stream, is fitted by the client to what the primary gets wrong
on the client's own rows, and never leaves it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Normaliser
from apfl.models.base import ClientModel, common_of
from apfl.models.file import Container

__all__ = ["DualStream"]


@dataclass(frozen=True, eq=False)
class DualStream(ClientModel):
    """A client's model. Without a refinement it is the primary stream alone, as AFL or a new client has it.

    >>> from apfl import random_map
    >>> model = DualStream(random_map(4, 8), torch.ones(8, 2, dtype=torch.float64), class_names=["cat", "dog"])
    >>> model
    DualStream(primary (8, 2), balance 0, 2 classes)
    >>> tuple(model.scores(torch.ones(3, 4)).shape)
    (3, 2)
    """

    primary_map: FeatureMap
    primary: Tensor  # G (d_P, c), float64
    refinement_map: FeatureMap | None = None
    refinement: Tensor | None = None  # P_k (d_R, c), float64
    balance: float = 0.0  # lambda
    normaliser: Normaliser = field(default_factory=Normaliser)
    class_names: Sequence[str] | None = None
    temperature: float | None = None  # of softmax(scores / temperature)
    prior: Tensor | None = None  # (c,), added to the scores: tau * log(p_k / p)
    about: Mapping[str, Any] = field(default_factory=dict)  # whose model it is, of which features; see `file.about`

    kind = "dual-stream"

    def __repr__(self) -> str:
        streams = [f"primary {tuple(self.primary.shape)}"]
        streams += [] if self.refinement is None else [f"refinement {tuple(self.refinement.shape)}"]
        return f"DualStream({', '.join(streams)}, balance {self.balance:g}, {self.primary.shape[1]} classes)"

    def _scores(self, features: Tensor) -> Tensor:
        """Phi G + balance * Psi P_k, plus the local prior if there is one, (n, c), float64."""
        z = self.normaliser(features)
        scores = self.primary_map(z).to(torch.float64) @ self.primary
        if self.refinement is not None and self.refinement_map is not None and self.balance:
            scores.add_(self.refinement_map(z).to(torch.float64) @ self.refinement, alpha=self.balance)
        return scores if self.prior is None else scores.add_(self.prior)

    def container(self) -> Container:
        """The model as data."""
        tensors = {"primary": self.primary, "prior": self.prior}
        settings = {
            "primary_map": self.primary_map.spec(),
            "balance": self.balance,
            "temperature": self.temperature,
        }
        if self.refinement is not None and self.refinement_map is not None:
            tensors["refinement"] = self.refinement
            settings["refinement_map"] = self.refinement_map.spec()
        return self._with_common(tensors, settings)

    @classmethod
    def from_container(cls, container: Container) -> Self:
        """The model back from data; its random maps are drawn again and checked by fingerprint."""
        with container.opened(cls.kind) as (tensors, settings):
            refinement_map = settings.get("refinement_map")
            model = cls(
                primary_map=FeatureMap.from_spec(settings["primary_map"]),
                primary=tensors["primary"],
                refinement_map=None if refinement_map is None else FeatureMap.from_spec(refinement_map),
                refinement=tensors.get("refinement"),
                balance=float(settings["balance"]),
                temperature=settings["temperature"],
                prior=tensors.get("prior"),
                **common_of(container),
            )
        if model.primary.shape[0] != model.primary_map.width:
            raise InputError(
                f"the model contradicts itself: a primary stream of {model.primary.shape[0]} rows "
                f"for a map of width {model.primary_map.width}"
            )
        return model
