"""Residual blocks on random features, with a linear head on top: what DeepAFL gives everyone.

    X_0 = tanh(Z R_0),   X_{t+1} = X_t + act(X_t R_{t+1}) Delta_{t+1},   scores = X_L W + b

The random maps are stored by their seeds and drawn again when the model is read.
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

__all__ = ["ResidualBlocks"]


@dataclass(frozen=True, eq=False)
class ResidualBlocks(ClientModel):
    """A shared model, with a bias that a client may have made its own."""

    first: FeatureMap  # R_0
    maps: Sequence[FeatureMap]  # R_1 .. R_L
    blocks: Sequence[Tensor]  # Delta_1 .. Delta_L (r, h)
    weight: Tensor  # W (h, c)
    bias: Tensor  # b (c,)
    normaliser: Normaliser = field(default_factory=Normaliser)
    class_names: Sequence[str] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # whose model it is, of which features; see `file.about`

    kind = "residual-blocks"

    def __repr__(self) -> str:
        return f"ResidualBlocks({len(self.blocks)} blocks of {len(self.weight)}, {self.weight.shape[1]} classes)"

    def _scores(self, features: Tensor) -> Tensor:
        return torch.addmm(self.bias, self.represent(features), self.weight)

    def represent(self, features: Tensor) -> Tensor:
        """X_L, what the weights are multiplied with, (n, h)."""
        if features.ndim != 2 or self.normaliser.width(features.shape[1]) != self.first.n_in:
            raise InputError(
                f"features of shape {tuple(features.shape)} given; this model was made for (n, {self.first.n_in})"
            )
        hidden = self.first(self.normaliser(features).double())
        for feature_map, block in zip(self.maps, self.blocks, strict=True):
            hidden = hidden + feature_map(hidden) @ block
        return hidden

    def container(self) -> Container:
        """The model as data."""
        blocks = {f"block_{t}": block for t, block in enumerate(self.blocks)}
        settings: dict[str, Any] = {"first": self.first.spec(), "maps": [each.spec() for each in self.maps]}
        return self._with_common({"weight": self.weight, "bias": self.bias, **blocks}, settings)

    @classmethod
    def from_container(cls, container: Container) -> Self:
        """The model back from data."""
        with container.opened(cls.kind) as (tensors, settings):
            maps = [_drawn(spec) for spec in settings["maps"]]
            blocks = [tensors[f"block_{t}"] for t in range(len(maps))]
            first = _drawn(settings["first"])
            return cls(first, maps, blocks, tensors["weight"], tensors["bias"], **common_of(container))


def _drawn(spec: dict[str, Any]) -> FeatureMap:
    return FeatureMap.from_spec(spec).like(torch.zeros(1, dtype=torch.float64))
