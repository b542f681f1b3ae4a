"""A linear head on features: what a gradient method, or any method with one linear decision, gives a client.

scores = rep W + b        rep = the features, or max(0, Z A + a) with an adapter, plus a private offset m
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.maths.lifts import Buckets, Lift, map_from_spec
from apfl.maths.maps import FeatureMap
from apfl.maths.normalise import Normaliser
from apfl.models.base import ClientModel, common_of
from apfl.models.file import Container

__all__ = ["LinearHead"]

_OPTIONAL = ("base_weight", "base_bias", "offset")


@dataclass(frozen=True, eq=False)
class LinearHead(ClientModel):
    """A client's model. A bias of minus infinity rules a class out."""

    weight: Tensor  # W (r, c)
    bias: Tensor  # b (c,)
    base_weight: Tensor | None = None  # A (l, r), the adapter
    base_bias: Tensor | None = None  # a (r,)
    offset: Tensor | None = None  # m (r,)
    unit: bool = False  # representations are brought to length one
    feature_map: FeatureMap | Lift | None = None  # a fixed map between the features and all this
    normaliser: Normaliser = field(default_factory=Normaliser)
    class_names: Sequence[str] | None = None
    about: Mapping[str, Any] = field(default_factory=dict)  # whose model it is, of which features; see `file.about`

    kind = "linear-head"

    def __repr__(self) -> str:
        adapter = "" if self.base_weight is None else f"adapter {tuple(self.base_weight.shape)}, "
        return f"LinearHead({adapter}weight {tuple(self.weight.shape)}, {self.weight.shape[1]} classes)"

    def _scores(self, features: Tensor) -> Tensor:
        """(n, c), in the dtype of the head."""
        return torch.addmm(self.bias, self.represent(features), self.weight)

    def represent(self, features: Tensor) -> Tensor:
        """What the weights are multiplied with, (n, r)."""
        # A bit may turn on the last digit of a single-precision number.
        z = self.normaliser(features.double() if isinstance(self.feature_map, Buckets) else features)
        if self.feature_map is not None:
            z = self.feature_map(z)
        rep = z.to(self.weight.dtype)
        width = self.weight.shape[0] if self.base_weight is None else self.base_weight.shape[0]
        if rep.ndim != 2 or rep.shape[1] != width:
            raise InputError(f"features of shape {tuple(features.shape)} given; this model was made for (n, {width})")
        if self.base_weight is not None and self.base_bias is not None:
            rep = torch.relu_(torch.addmm(self.base_bias, rep, self.base_weight))
        if self.unit:
            rep = torch.nn.functional.normalize(rep)
        if self.offset is not None:
            rep = rep + self.offset
        return rep

    def container(self) -> Container:
        """The model as data."""
        tensors = {"weight": self.weight, "bias": self.bias, **{name: getattr(self, name) for name in _OPTIONAL}}
        spec = None if self.feature_map is None else self.feature_map.spec()
        return self._with_common(tensors, {"unit": self.unit, "feature_map": spec})

    @classmethod
    def from_container(cls, container: Container) -> Self:
        """The model back from data."""
        with container.opened(cls.kind) as (tensors, settings):
            spec = settings["feature_map"]
            return cls(
                tensors["weight"],
                tensors["bias"],
                tensors.get("base_weight"),
                tensors.get("base_bias"),
                tensors.get("offset"),
                unit=bool(settings["unit"]),
                feature_map=None if spec is None else map_from_spec(spec),
                **common_of(container),
            )
