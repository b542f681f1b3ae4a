"""DeepAFL: residual blocks fitted one after another in closed form, each on what the ones before it get wrong.

    X_0 = tanh(Z R_0),        W_t = argmin |Y - X_t W|^2 + gamma |W|^2
    F = act(X_t R_{t+1}),     Delta = argmin |Y - X_t W_t - F Delta W_t|^2 + block_ridge |Delta|^2
    X_{t+1} = X_t + F Delta

"DeepAFL: Deep Analytic Federated Learning", ICLR 2026 (arXiv 2603.00579); defaults from the authors' code, except for
the number of blocks (theirs is 20). Every sum is over clients: one exchange for each W_t, and one for each block
(F'F and W R'F), 2 L + 1 in all. Sums do not depend on how rows are spread, so neither does the model.

Departures: random maps as ours are drawn, normal and without a bias (theirs are uniform, with one); rows come
normalised; systems are solved, not inverted, in float64 (their float32 inverse warns of singular matrices). The last
model is everyone's; ``adapt`` is the adaptation that all shared heads can have (`_head`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.data.targets import Target
from apfl.maths.maps import Activation, random_map
from apfl.maths.normalise import Normalise, needs_moments
from apfl.maths.wire import description_bytes, scaling_bytes
from apfl.methods import Round
from apfl.methods._analytic import ANY_TARGET, Width, shared_normaliser
from apfl.methods._head import Adapting, Made
from apfl.models.residual import ResidualBlocks


@dataclass(frozen=True)
class DeepAFL(Adapting):
    """Residual random-feature blocks, each fitted in closed form to the residuals of everyone's rows."""

    d: Width = 1024  # of the representation
    d_block: Width = 1024  # random features of each block
    blocks: Annotated[int, Field(ge=0)] = 5
    gamma: Annotated[float, Field(gt=0)] = 1.0
    block_ridge: Annotated[float, Field(gt=0)] = 0.05
    activation: Activation = "gelu"
    normalise: Normalise = "row"

    own_grid: ClassVar[Mapping[str, Any]] = {"gamma": (0.1, 1.0, 10.0), "blocks": (5, 20)}

    @property
    def predicts(self) -> Sequence[Target]:
        return ANY_TARGET if self.adapt == "none" else ("classification",)

    def widths(self, n_samples: int, n_features: int) -> tuple[int, int]:
        return self.d, self.d_block

    def made(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Made[ResidualBlocks]:
        normalise = shared_normaliser(self.normalise, clients)
        rows = torch.cat([normalise(shard.features) for shard in clients]).double()
        targets = torch.cat([shard.responses(n_classes) for shard in clients])
        first = random_map(rows.shape[1], self.d, "tanh", seed * (self.blocks + 1)).like(rows)
        hidden, maps, deltas = first(rows), [], []
        weight = ridge(hidden, targets, self.gamma)
        for t in range(self.blocks):
            drawn = random_map(self.d, self.d_block, self.activation, seed * (self.blocks + 1) + t + 1).like(rows)
            features = drawn(hidden)
            delta = sandwiched(features, weight, targets - hidden @ weight, self.block_ridge)
            hidden = hidden + features @ delta
            weight = ridge(hidden, targets, self.gamma)
            maps.append(drawn)
            deltas.append(delta)
        counts = targets.sum(0)
        shared = ResidualBlocks(first, maps, deltas, weight, torch.zeros_like(counts), normalise)
        up, down = self._bytes(n_classes)
        moments = needs_moments(self.normalise)
        up += description_bytes(clients[0].features.shape[1], moments=True) if moments else 0
        last = Round(
            [shared] * len(clients), index=2 * self.blocks + 1 + moments, bytes_up=len(clients) * up,
            bytes_down=len(clients) * (down + scaling_bytes(normalise)),
        )  # fmt: skip
        return Made(shared, counts, last)

    def _bytes(self, n_classes: int) -> tuple[int, int]:
        """Of all exchanges of one client, in float64: triangles of X'X and F'F, X'Y and W R'F up; W and Delta down."""
        tops, d, r = self.blocks + 1, self.d, self.d_block
        up = tops * (d * (d + 1) // 2 + d * n_classes) + self.blocks * (r * (r + 1) // 2 + d * r)
        return 8 * up, 8 * (tops * d * n_classes + self.blocks * r * d)


def ridge(rows: Tensor, targets: Tensor, penalty: float) -> Tensor:
    """(X'X + penalty I)^-1 X'Y, (d, c)."""
    system = rows.T @ rows
    system.diagonal().add_(penalty)
    return torch.cholesky_solve(rows.T @ targets, torch.linalg.cholesky(system)).contiguous()


def sandwiched(features: Tensor, weight: Tensor, residual: Tensor, penalty: float) -> Tensor:
    """Delta (r, h) that minimises |R - F Delta W|^2 + penalty |Delta|^2.

    With F'F = V diag(s) V' and W W' = U diag(w) U' the normal equations F'F Delta W W' + penalty Delta = F'R W' are
    diagonal.
    """
    s, v = torch.linalg.eigh(features.T @ features)
    w, u = torch.linalg.eigh(weight @ weight.T)
    right = v.T @ (features.T @ residual @ weight.T) @ u
    solved: Tensor = v @ (right / (s.clamp_min(0)[:, None] * w.clamp_min(0) + penalty)) @ u.T
    return solved.contiguous()  # as it comes back from disk: the memory order decides the last bit of a product
