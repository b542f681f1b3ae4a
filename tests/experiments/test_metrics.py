"""Metrics against their definitions and against scikit-learn."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from sklearn.metrics import recall_score, roc_auc_score

from apfl.data.federation import Federation, Shard
from apfl.errors import InputError
from apfl.experiments.metrics import client_accuracies, metrics


@dataclass
class Fixed:
    """A model that says what it is told."""

    answers: torch.Tensor

    def scores(self, features: torch.Tensor) -> torch.Tensor:
        return self.answers


def shard(labels: list[int]) -> Shard:
    return Shard(torch.zeros(len(labels), 2), torch.tensor(labels, dtype=torch.long))


def says(predicted: list[int], n_classes: int = 3) -> Fixed:
    return Fixed(torch.nn.functional.one_hot(torch.tensor(predicted, dtype=torch.long), n_classes).double())


def test_weightings_differ_as_their_names_say():
    models = [says([0, 0]), says([1, 1, 1, 1, 0, 0]), Fixed(torch.zeros(0, 3))]
    tests = [shard([0, 1]), shard([1, 1, 1, 1, 1, 2]), shard([])]
    found = metrics(models, tests, 3)
    assert found["client_accuracies"] == [0.5, 4 / 6, None] == client_accuracies(models, tests)
    assert found["accuracy_client_mean"] == pytest.approx((0.5 + 4 / 6) / 2)
    assert found["accuracy_sample_mean"] == pytest.approx(5 / 8)
    assert found["accuracy_client_std"] == pytest.approx(abs(0.5 - 4 / 6) / 2)
    assert found["accuracy_worst_decile"] == 0.5
    assert found["balanced_accuracy_client_mean"] == pytest.approx((0.5 + (4 / 5 + 0) / 2) / 2)
    assert found["recall_per_class"] == pytest.approx([1.0, 4 / 6, 0.0])
    assert found["n_clients_without_test"] == 1


def test_worst_decile_is_the_mean_of_a_tenth_of_the_clients_rounded_up():
    tests = [shard([0] * 20) for _ in range(11)]
    models = [says([0] * k + [1] * (20 - k)) for k in range(11)]
    assert metrics(models, tests, 3)["accuracy_worst_decile"] == pytest.approx((0 + 1 / 20) / 2)


def test_balanced_accuracy_and_auroc_agree_with_scikit_learn():
    rng = np.random.default_rng(0)
    tests, models, balanced, aurocs = [], [], [], []
    for _ in range(5):
        labels = np.concatenate([[0, 1, 2], rng.integers(3, size=30)])
        scores = np.round(rng.normal(size=(33, 4)) + 0.7 * np.eye(4)[labels], 1)  # rounded: with ties
        tests.append(shard(labels.tolist()))
        models.append(Fixed(torch.from_numpy(scores)))
        balanced.append(recall_score(labels, scores.argmax(1), labels=[0, 1, 2], average="macro"))
        aurocs.append(np.mean([roc_auc_score(labels == k, scores[:, k]) for k in range(3)]))  # class 3 is not there
    found = metrics(models, tests, 4)
    assert found["auroc_client_mean"] == pytest.approx(np.mean(aurocs), abs=1e-12)
    assert found["recall_per_class"][3] is None
    assert found["balanced_accuracy_client_mean"] == pytest.approx(np.mean(balanced), abs=1e-12)


def test_auroc_is_undefined_with_one_class():
    assert metrics([says([0, 1])], [shard([0, 0])], 3)["auroc_client_mean"] is None


def test_what_cannot_be_measured_is_refused():
    with pytest.raises(InputError, match="no client has test rows"):
        metrics([says([])], [shard([])], 3)
    with pytest.raises(InputError, match="2 models for 1 clients"):
        metrics([says([]), says([])], [shard([])], 3)


def test_a_federation_is_checked():
    one = shard([0, 1])
    with pytest.raises(InputError, match="more than once: a"):
        Federation([one, one], [one, one], ("x", "y"), ["a", "a"])
    with pytest.raises(InputError, match="client b has no training rows"):
        Federation([one, shard([])], [one, one], ("x", "y"), ["a", "b"])
    with pytest.raises(InputError, match="same number"):
        Federation([one], [], ("x", "y"))
    with pytest.raises(InputError, match=r"expected \(n, l\)"):
        Shard(torch.zeros(3, 2), torch.zeros(2))
