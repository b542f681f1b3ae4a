"""FedPFT: clients send Gaussian mixtures of their features, class by class; the server trains a head on what it draws.

Beitollahi et al., "Parametric Feature Transfer: One-shot Federated Learning with Foundation Models" (arXiv 2402.01862):
one round; mixtures with diagonal covariances, parameters in float16, as many synthetic rows as a client has.

Departures. Public code leaves a class out whose rows at a client are not more than the mixture has components, which
with label skew loses most of the rare ones: here such a class has as many components as rows. The head is trained by
the engine of the gradient methods, whose rate is tuned, on rows normalised as theirs are.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np
import torch
from pydantic import Field
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

from apfl.data.federation import Shard
from apfl.maths.normalise import Normalise
from apfl.maths.ridge import one_hot
from apfl.methods._analytic import shared_normaliser
from apfl.methods._head import Head, TrainedHead, trained_heads
from apfl.methods._training import RATES
from apfl.models.linear_head import LinearHead

SMALLEST_VARIANCE = 1e-4  # of rows whose mean square is 1: float16 knows nothing far below it


class Mixture(NamedTuple):
    """What a client says about one class: float16, and the number of its rows."""

    label: int
    n_rows: int
    weights: np.ndarray  # (m,)
    means: np.ndarray  # (m, l)
    variances: np.ndarray  # (m, l)

    @property
    def n_bytes(self) -> int:
        return self.weights.nbytes + self.means.nbytes + self.variances.nbytes + 16


@dataclass(frozen=True)
class FedPFT(TrainedHead):
    """A head trained on rows drawn from the clients' mixtures, one for each client and class."""

    components: Annotated[int, Field(gt=0)] = 1
    epochs: Annotated[int, Field(gt=0)] = 50
    batch: Annotated[int, Field(gt=0)] = 64
    normalise: Normalise = "root"

    own_grid: ClassVar[Mapping[str, Any]] = {"components": (1, 5), "lr": RATES}

    def heads(self, clients: Sequence[Shard], n_classes: int, seed: int, rates: Sequence[float]) -> list[Head]:
        normalise = shared_normaliser(self.normalise, clients)
        sent = [mixtures(Shard(normalise(s.features), s.labels), self.components, seed) for s in clients]
        drawn = synthetic([each for own in sent for each in own], clients[0].features, seed)
        counts = one_hot(torch.cat([shard.labels for shard in clients]), n_classes).sum(0)
        up = [sum(each.n_bytes for each in own) for own in sent]
        heads = []
        for trained in trained_heads(drawn, n_classes, seed, rates=rates, epochs=self.epochs, batch=self.batch):
            bias = trained.bias.masked_fill(counts == 0, -torch.inf)
            model = LinearHead(trained.weight, bias, normaliser=normalise)
            heads.append(Head(model, counts, up, 4 * (trained.weight.numel() + len(bias))))
        return heads


def mixtures(rows: Shard, components: int, seed: int) -> list[Mixture]:
    """A mixture for each class that the client has."""
    found = []
    for label in torch.unique(rows.labels).tolist():
        own = rows.features[rows.labels == label].double().cpu().numpy()
        half = (each.astype(np.float16) for each in _fitted(own, min(components, len(own)), seed))
        found.append(Mixture(label, len(own), *half))
    return found


def _fitted(rows: np.ndarray, components: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weights, means and variances of a mixture; one component needs no iterations."""
    if components == 1:
        return np.ones(1), rows.mean(0, keepdims=True), rows.var(0, keepdims=True) + SMALLEST_VARIANCE
    fitted = GaussianMixture(components, covariance_type="diag", reg_covar=SMALLEST_VARIANCE, random_state=seed % 2**32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        fitted.fit(rows)
    return fitted.weights_, fitted.means_, fitted.covariances_


def synthetic(sent: Sequence[Mixture], like: torch.Tensor, seed: int) -> Shard:
    """As many rows as the clients have, drawn from their mixtures."""
    rng = np.random.default_rng(seed)
    rows, labels = [], []
    for each in sent:
        weights = each.weights.astype(np.float64)
        place = rng.choice(len(weights), each.n_rows, p=weights / weights.sum())
        noise = rng.standard_normal((each.n_rows, each.means.shape[1]))
        rows.append(each.means[place].astype(np.float64) + noise * np.sqrt(each.variances[place].astype(np.float64)))
        labels.append(np.full(each.n_rows, each.label))
    features = torch.from_numpy(np.concatenate(rows)).to(like)
    return Shard(features, torch.from_numpy(np.concatenate(labels)).to(like.device))
