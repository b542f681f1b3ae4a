"""GH-OFL: heads from the class moments that clients sum once, closed forms or trained on rows drawn from the moments.

    nb         Gaussian classes with a diagonal covariance each
    lda        Gaussian classes with one covariance, that within classes: `fedlda` but for N - c in place of N
    qda        Gaussian classes with a covariance each; sends (l + 1) l / 2 numbers for each class
    fishermix  a linear head trained on rows drawn from one Gaussian for each class in the Fisher subspace

Turazza, Picone, Mamei, "The Gaussian-Head OFL Family: One-Shot Federated Learning from Client Global Statistics", ICLR
2026 (arXiv 2602.01186); public code FabioTur-dev/One-Shot-FL. The Fisher subspace is S^(-1/2) U, with S the shrunk
covariance within classes and U the leading eigenvectors of S^(-1/2) B S^(-1/2), B the scatter of the class means; as
many as have 99.5 % of its trace. In it S is the identity, so rows are drawn as mean + spread * N(0, I).

Proto-Hyper, the family's fifth head, is not here: public texts contradict each other about its base and its teacher
(standardised LDA taught by QDA and LDA; or naive Bayes taught by LDA and naive Bayes), and in the code of the
proceedings the latter two are the same function, because S is the identity in the subspace.

Departures. Rows are drawn with the common covariance (the code's fallback; with those of the classes a client sends as
much as for qda). The trained head has no cosine margin (nor has the code, unlike the abstract), and the engine of the
gradient methods trains it, whose rate is tuned. Class covariances are shrunk as the common one is, for naive Bayes too,
whose variances the code only keeps above 1e-6; a class with one row has the common one. A class that nobody has is
ruled out. The random projection that the paper may apply first is not here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.lifts import Products
from apfl.maths.machine import available
from apfl.maths.maps import normals
from apfl.maths.normalise import Normalise, Normaliser
from apfl.maths.ridge import Statistics
from apfl.maths.wire import nbytes
from apfl.methods._analytic import shared_normaliser, summed_features, upload_bytes
from apfl.methods._gaussian import gaussian_head, scale_of
from apfl.methods._head import Head, TrainedHead, class_sums, trained_heads
from apfl.methods._training import RATES
from apfl.models.linear_head import LinearHead


@dataclass(frozen=True)
class GHOFL(TrainedHead):
    """A head from class moments: Gaussian in closed form, or trained on rows drawn from them."""

    kind: Literal["nb", "lda", "qda", "fishermix"] = "fishermix"  # which of the family
    shrinkage: Annotated[float, Field(gt=0, le=1)] = 0.05
    energy: Annotated[float, Field(gt=0, le=1)] = 0.995  # share of the class scatter in the Fisher subspace
    spread: Annotated[float, Field(gt=0)] = 0.9  # standard deviation of drawn rows there
    drawn: Annotated[int, Field(gt=0)] = 500  # rows of each class; 4000 in the public code
    epochs: Annotated[int, Field(gt=0)] = 40
    normalise: Normalise = "row"

    own_grid: ClassVar[Mapping[str, Any]] = {"shrinkage": (0.01, 0.05, 0.2), "lr": RATES}

    @property
    def grid(self) -> Mapping[str, Sequence[Any]]:
        return {name: v for name, v in super().grid.items() if name != "lr" or self.kind == "fishermix"}

    def heads(self, clients: Sequence[Shard], n_classes: int, seed: int, rates: Sequence[float]) -> list[Head]:
        if self.kind in ("nb", "qda"):
            return [self._quadratic(clients, n_classes)] * len(rates)
        normalise, _, summed = summed_features(clients, n_classes, self.normalise)
        up = upload_bytes(clients, summed)
        within = self._shrunk(_within(summed), summed)
        made = gaussian_head(summed, within, normalise, f"shrinkage {self.shrinkage:g}", up)
        if self.kind == "lda":
            return [made] * len(rates)
        subspace = fisher_subspace(summed, within, self.energy)
        return [made._replace(model=model) for model in self._trained(summed, subspace, normalise, seed, rates)]

    def _shrunk(self, covariance: Tensor, summed: Statistics) -> Tensor:
        shrunk = (1 - self.shrinkage) * covariance
        shrunk.diagonal().add_(self.shrinkage * scale_of(covariance, summed))
        return shrunk

    def _trained(
        self, summed: Statistics, subspace: Tensor, normalise: Normaliser, seed: int, rates: Sequence[float]
    ) -> list[LinearHead]:
        """A head for each rate on rows of the Fisher subspace, as a head on features."""
        there = torch.nonzero(summed.class_counts > 0).flatten()
        means = (summed.crosscorrelation / summed.class_counts.clamp_min(1)).T[there] @ subspace  # (classes, k)
        noise = normals(seed, self.drawn * len(there), subspace.shape[1]).to(means)
        rows = means.repeat_interleave(self.drawn, 0) + self.spread * noise
        shard = Shard(rows.float(), there.repeat_interleave(self.drawn))
        heads = trained_heads(shard, len(summed.class_counts), seed, rates=rates, epochs=self.epochs)
        absent = summed.class_counts == 0
        return [
            LinearHead(
                subspace @ head.weight.to(subspace), head.bias.to(subspace).masked_fill(absent, -math.inf),
                normaliser=normalise,
            )
            for head in heads
        ]  # fmt: skip

    def _quadratic(self, clients: Sequence[Shard], n_classes: int) -> Head:
        """log n_y - log |S_y| / 2 - (z - mu_y)' S_y^-1 (z - mu_y) / 2 as a linear head on products of features."""
        normalise = shared_normaliser(self.normalise, clients)
        lift = Products(normalise.width(clients[0].features.shape[1]), pairs=self.kind == "qda")
        _check_memory(lift, n_classes)
        uploads = [class_sums(shard, n_classes, normalise, lift) for shard in clients]
        sums, counts = (torch.stack(each).sum(0) for each in zip(*uploads, strict=True))  # (r, c), (c,)
        moments = class_moments(lift, sums, counts, self.shrinkage)
        weight = torch.zeros_like(sums)
        bias = torch.full_like(counts, -math.inf)
        for y, (mean, covariance) in moments.items():
            weight[:, y], constant = log_likelihood(lift, mean, covariance)
            bias[y] = constant + counts[y].log()
        up = [nbytes({"sums": own, "counts": n}) for own, n in uploads]
        model = LinearHead(weight, bias, feature_map=lift, normaliser=normalise)
        return Head(model, counts, up, nbytes({"weight": weight, "bias": bias}))


def _within(summed: Statistics) -> Tensor:
    """The covariance within classes, (Z'Z - sum_y n_y mu_y mu_y') / (N - c)."""
    counts = summed.class_counts
    means = summed.crosscorrelation / counts.clamp_min(1)
    return (summed.autocorrelation - (means * counts) @ means.T) / max(summed.n_samples - len(counts), 1)


def fisher_subspace(summed: Statistics, within: Tensor, energy: float) -> Tensor:
    """The leading directions in which class means differ, in units of the covariance within classes, (l, k)."""
    counts = summed.class_counts
    means = summed.crosscorrelation / counts.clamp_min(1)
    centred = (means - summed.crosscorrelation.sum(1, keepdim=True) / summed.n_samples) * (counts / counts.sum()).sqrt()
    values, vectors = torch.linalg.eigh(within)
    root = (vectors * values.clamp_min(values.max() * 1e-14).rsqrt()) @ vectors.T
    left, size, _ = torch.linalg.svd(root @ centred, full_matrices=False)  # B = centred centred'
    share = size.square().cumsum(0) / size.square().sum().clamp_min(1e-300)
    kept = min(int((share < energy).sum()) + 1, int((size > 1e-9 * size.max()).sum()) or 1)
    subspace: Tensor = root @ left[:, :kept]
    return subspace


def class_moments(lift: Products, sums: Tensor, counts: Tensor, shrinkage: float) -> dict[int, tuple[Tensor, Tensor]]:
    """Mean and covariance of each class that there is; a covariance is (l, l), or its diagonal (l,)."""
    there = torch.nonzero(counts > 0).flatten().tolist()
    firsts, products = sums[: lift.n_in], sums[lift.n_in :]
    means = {y: firsts[:, y] / counts[y] for y in there}
    scatters = {y: _square(lift, products[:, y]) - counts[y] * _outer(lift, means[y]) for y in there}
    every = torch.stack(list(scatters.values())).sum(0)
    common = every / max(float(counts.sum()) - len(there), 1.0)
    own = {y: scatters[y] / (counts[y] - 1) if counts[y] > 1 else common for y in there}
    floor = 1e-10 * _diagonal(_square(lift, products.sum(1) / counts.sum())).mean().clamp_min(1e-200)
    return {y: (means[y], _shrink(own[y], shrinkage, floor)) for y in there}


def _square(lift: Products, products: Tensor) -> Tensor:
    """Sums of z_i z_j as a symmetric matrix; those of z_i^2 as they are."""
    if not lift.pairs:
        return products
    i, j = lift.factors
    matrix = products.new_zeros(lift.n_in, lift.n_in)
    matrix[i, j] = matrix[j, i] = products
    return matrix


def _outer(lift: Products, mean: Tensor) -> Tensor:
    return torch.outer(mean, mean) if lift.pairs else mean.square()


def _diagonal(covariance: Tensor) -> Tensor:
    return covariance.diagonal() if covariance.ndim == 2 else covariance


def _shrink(covariance: Tensor, shrinkage: float, floor: Tensor) -> Tensor:
    """(1 - s) S + s mean(diag) I; rows that hardly vary leave the rounding of the subtraction, hence the floor."""
    scale = torch.maximum(_diagonal(covariance).mean(), floor)
    kept = (1 - shrinkage) * covariance
    if covariance.ndim == 1:
        return kept.clamp_min(0) + shrinkage * scale
    kept.diagonal().add_(shrinkage * scale)
    return kept


def log_likelihood(lift: Products, mean: Tensor, covariance: Tensor) -> tuple[Tensor, Tensor]:
    """Coefficients of (z, products) and the constant of -log |S| / 2 - (z - mu)' S^-1 (z - mu) / 2."""
    if covariance.ndim == 1:
        precision = covariance.reciprocal()
        linear, curved, logdet = precision * mean, -precision / 2, covariance.log().sum()
    else:
        factor, failed = torch.linalg.cholesky_ex(covariance)
        if int(failed):
            raise InputError("the covariance of a class is singular: use more shrinkage")
        inverse = torch.cholesky_inverse(factor)
        i, j = lift.factors
        linear, curved = inverse @ mean, -torch.where(i == j, inverse[i, j] / 2, inverse[i, j])
        logdet = 2 * factor.diagonal().log().sum()
    return torch.cat([linear, curved]), -(logdet + mean @ linear) / 2


def _check_memory(lift: Products, n_classes: int) -> None:
    have, need = available(torch.device("cpu")), 4 * 8 * lift.width * n_classes
    if have is not None and need > have:
        raise InputError(
            f"covariances of {n_classes} classes of {lift.n_in} features take {need / 1e9:.0f} GB; use kind='nb'"
        )
