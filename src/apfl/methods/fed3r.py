"""Fed3R: federated ridge regression with a bias on the backbone's own features, each class's weights at length one.

Fanì et al., "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers", ICML 2024. The first phase,
the classifier itself; the paper's fine-tuning of the backbone does not exist on frozen features. Column and bias of a
class are divided by the column's length, which keeps a frequent class from scoring higher for its frequency.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.maps import raw_map
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import solve
from apfl.maths.wire import nbytes
from apfl.methods import Method, Round
from apfl.methods._analytic import mapped_and_summed, one_exchange, shared_normaliser, upload_bytes
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class Fed3R(Method):
    """Federated ridge head with columns of length one: one head for everyone, nothing personal."""

    gamma: Annotated[float, Field(gt=0)] = 1.0
    normalise: Normalise = "row"

    personal: ClassVar[bool] = False
    grid: ClassVar[Mapping[str, Any]] = {"gamma": (0.01, 1.0, 100.0)}

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        normalise = shared_normaliser(self.normalise, clients)
        n_features = clients[0].features.shape[1]
        feature_map = raw_map(normalise.width(n_features), intercept=True)
        _, summed = mapped_and_summed(clients, n_classes, normalise, feature_map)
        head = solve(summed, self.gamma)  # (l + 1, c)
        length = head[:-1].norm(dim=0).clamp_min(1e-6)
        bias = (head[-1] / length).masked_fill(summed.class_counts == 0, -math.inf)  # nobody has such a class
        yield one_exchange(
            [LinearHead(head[:-1] / length, bias, normaliser=normalise)] * len(clients), normalise, n_features,
            up=upload_bytes(clients, summed), down=nbytes({"head": head}),
        )  # fmt: skip
