"""How good the clients' models are.

A metric's name carries its weighting. The paper's is ``accuracy_client_mean``: the unweighted mean over clients of the
accuracy of each client's final model on its own test rows. All are fractions. A client without test rows has no
accuracy; it is left out and counted in ``n_clients_without_test``. A test row without a decision counts as wrong.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from apfl.data.federation import Federation, Shard
from apfl.data.targets import Scale
from apfl.errors import InputError
from apfl.experiments.measures import client_scores, measures
from apfl.models.dual_stream import DualStream
from apfl.models.file import Model
from apfl.models.undecided import undecided

__all__ = [
    "class_counts",
    "client_accuracies",
    "headline_scores",
    "metrics",
    "no_test_rows",
    "primary_accuracies",
    "target_metrics",
]

OF_CLASSES = (
    "accuracy_client_mean", "accuracy_client_std", "accuracy_sample_mean", "accuracy_worst_decile",
    "balanced_accuracy_client_mean", "auroc_client_mean",
)  # fmt: skip


def headline_scores(models: Sequence[Model], tests: Sequence[Shard], scale: Scale | None) -> list[float | None]:
    """What each client's model is judged by first: its accuracy, or `measures.client_scores`."""
    if tests and tests[0].targets is not None:
        return client_scores(models, tests, scale)
    return client_accuracies(models, tests)


def target_metrics(models: Sequence[Model], federation: Federation, primary: Model | None = None) -> dict[str, Any]:
    """What a record has of results: metrics of classes, or measures of numbers or several labels."""
    tests, n_classes = federation.test, federation.n_classes
    if federation.target == "classification":
        return metrics(models, tests, n_classes) | {
            "class_counts": class_counts(federation.train, n_classes),
            "primary_accuracies": primary_accuracies(models, tests, primary),
        }
    none: dict[str, Any] = {**dict.fromkeys(OF_CLASSES), "recall_per_class": [], "client_accuracies": []}
    none |= {"class_counts": [], "primary_accuracies": []}
    return none | {"target": federation.target} | measures(models, tests, federation.scale)


def client_accuracies(models: Sequence[Model], tests: Sequence[Shard]) -> list[float | None]:
    """Accuracy of each client's model on the client's own test rows; None without any.

    >>> import apfl
    >>> data = apfl.federation("digits", clients=3)
    >>> (*_, last) = apfl.load_method("afl").rounds(data.train, data.n_classes, seed=0)
    >>> len(client_accuracies(last.models, data.test))
    3
    """
    hits = [
        (_predicted(model, test)[1] == test.labels).double().mean()
        for model, test in _pairs(models, tests)
        if len(test)
    ]
    known = iter(torch.stack(hits).tolist() if hits else [])  # one wait for the device, not one for each client
    return [next(known) if len(test) else None for test in tests]


def primary_accuracies(
    models: Sequence[Model], tests: Sequence[Shard], primary: Model | None = None
) -> list[float | None]:
    """Accuracy of the shared primary stream alone on each client's test rows; empty for models that have no other.

    ``primary`` is that stream, if models are folded into one matrix.
    """
    if primary is not None:
        return client_accuracies([primary] * len(tests), tests)
    shared = [
        replace(model, refinement_map=None, refinement=None, balance=0.0, prior=None)
        for model in models
        if isinstance(model, DualStream) and (model.refinement is not None or model.prior is not None)
    ]
    return client_accuracies(shared, tests) if shared and len(shared) == len(models) else []


def class_counts(shards: Sequence[Shard], n_classes: int) -> list[list[int]]:
    """How many rows of each class every client has, (clients, classes)."""
    return [torch.bincount(shard.labels, minlength=n_classes).tolist() for shard in shards]


def metrics(models: Sequence[Model], tests: Sequence[Shard], n_classes: int) -> dict[str, Any]:
    """All metrics of one set of models, one model for each client.

    ``accuracy_worst_decile`` is the mean of the ceil(K/10) worst clients. ``balanced_accuracy_client_mean`` averages
    recall over the classes in a client's test rows, then over clients. ``auroc_client_mean`` is one-vs-rest over the
    classes that a client's test rows both have and lack. ``recall_per_class`` pools the clients' test rows.

    >>> import apfl
    >>> data = apfl.federation("digits", clients=3)
    >>> (*_, last) = apfl.load_method("afl").rounds(data.train, data.n_classes, seed=0)
    >>> 0.5 < metrics(last.models, data.test, data.n_classes)["accuracy_client_mean"] <= 1
    True
    """
    accuracies: list[float | None] = []
    balanced, aurocs = [], []
    hits, counts = np.zeros(n_classes), np.zeros(n_classes)
    for model, test in _pairs(models, tests):
        scores, predicted = (each.cpu().numpy() for each in _predicted(model, test))
        labels = test.labels.cpu().numpy()
        accuracies.append(_accuracy(predicted, test))
        if not len(labels):
            continue
        own_hits = np.bincount(labels[predicted == labels], minlength=n_classes)
        own_counts = np.bincount(labels, minlength=n_classes)
        present = own_counts > 0
        balanced.append(float((own_hits[present] / own_counts[present]).mean()))
        aurocs += [auroc for auroc in [_auroc(scores, labels, own_counts)] if auroc is not None]
        hits, counts = hits + own_hits, counts + own_counts
    known = np.array([accuracy for accuracy in accuracies if accuracy is not None])
    if not len(known):
        raise no_test_rows()
    return {
        "accuracy_client_mean": float(known.mean()),
        "accuracy_client_std": float(known.std()),
        "accuracy_sample_mean": float(hits.sum() / counts.sum()),
        "accuracy_worst_decile": float(np.sort(known)[: math.ceil(len(known) / 10)].mean()),
        "balanced_accuracy_client_mean": float(np.mean(balanced)),
        "auroc_client_mean": float(np.mean(aurocs)) if aurocs else None,
        "recall_per_class": [float(h / c) if c else None for h, c in zip(hits, counts, strict=True)],
        "client_accuracies": accuracies,
        "n_clients_without_test": len(accuracies) - len(known),
    }


def no_test_rows() -> InputError:
    """Why a run without any test rows is refused."""
    return InputError("no client has test rows, so there is nothing to measure; keep some back for testing")


def _pairs(models: Sequence[Model], tests: Sequence[Shard]) -> Iterator[tuple[Model, Shard]]:
    """One at a time: models may be made when they are asked for."""
    if len(models) != len(tests):
        raise InputError(f"{len(models)} models for {len(tests)} clients; there must be one for each")
    yield from zip(models, tests, strict=True)


def _predicted(model: Model, test: Shard) -> tuple[Tensor, Tensor]:
    """Scores (n, c), NaN as the lowest, and classes (n,), -1 for a row without a decision: it counts as wrong."""
    scores = model.scores(test.features)
    missed = undecided(model, test.features, scores) > 0
    return scores.nan_to_num(-math.inf, math.inf, -math.inf), scores.argmax(1).masked_fill(missed, -1)


def _accuracy(predicted: np.ndarray, test: Shard) -> float | None:
    return float((predicted == test.labels.cpu().numpy()).mean()) if len(test) else None


def _auroc(scores: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> float | None:
    """Macro one-vs-rest area under the ROC curve from ranks (ties count half), over the classes where it is defined."""
    defined = np.flatnonzero((counts > 0) & (counts < len(labels)))
    if not len(defined):
        return None
    from scipy.stats import rankdata  # here, because it takes a second to import and few processes measure

    positives = counts[defined]
    ranks = rankdata(scores[:, defined], axis=0) * (labels[:, None] == defined)
    above = ranks.sum(0) - positives * (positives + 1) / 2
    return float((above / (positives * (len(labels) - positives))).mean())
