"""Fed3R: federated ridge regression with a bias on the backbone's own features, each class's weights at length one.

Fanì et al., "Accelerating Heterogeneous Federated Learning with Closed-form Classifiers", ICML 2024. The first phase,
the classifier itself; the paper's fine-tuning of the backbone does not exist on frozen features. Column and bias of a
class are divided by the column's length, which keeps a frequent class from scoring higher for its frequency.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import Field

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import solve
from apfl.maths.wire import nbytes
from apfl.methods._analytic import summed_features, upload_bytes
from apfl.methods._head import Head, OneHead
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class Fed3R(OneHead):
    """Federated ridge head with columns of length one: one head for everyone, nothing personal."""

    gamma: Annotated[float, Field(gt=0)] = 1.0
    normalise: Normalise = "row"

    own_grid: ClassVar[Mapping[str, Any]] = {"gamma": (0.01, 1.0, 100.0)}

    def head(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Head:
        normalise, _, summed = summed_features(clients, n_classes, self.normalise, intercept=True)
        head = solve(summed, self.gamma)  # (l + 1, c)
        length = head[:-1].norm(dim=0).clamp_min(1e-6)
        bias = (head[-1] / length).masked_fill(summed.class_counts == 0, -math.inf)  # nobody has such a class
        model = LinearHead(head[:-1] / length, bias, normaliser=normalise)
        return Head(model, summed.class_counts, upload_bytes(clients, summed), nbytes({"head": head}))
