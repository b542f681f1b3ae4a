"""Every row exactly once, and draws that stop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from apfl.data.partition import load_partition, partition_names, split
from apfl.errors import InputError


def deal(name: str, labels: np.ndarray, n_clients: int, seed: int, **options) -> list[np.ndarray]:
    n = np.arange(len(labels))
    extra = {"domains": {"domains": n % 2}, "given": {"column": n % max(n_clients, 1)}}
    extra |= {"dirichlet": {"alpha": 0.1}, "dirichlet_plain": {"alpha": 0.1}, "classes": {"classes_per_client": 2}}
    rng = np.random.default_rng(seed)
    return load_partition(name)(labels, n_clients, rng, **(extra.get(name, {}) | options))


@pytest.mark.parametrize("name", partition_names())
@given(n_clients=st.sampled_from([2, 4, 6]), seed=st.integers(0, 50))
def test_every_row_exactly_once_and_reproducibly(name, n_clients, seed):
    labels = np.random.default_rng(seed).integers(5, size=400)
    parts = deal(name, labels, n_clients, seed, **({"classes_per_client": 3} if name == "classes" else {}))
    assert len(parts) == n_clients
    assert min(len(part) for part in parts) > 0
    assert np.array_equal(np.sort(np.concatenate(parts)), np.arange(400))
    again = deal(name, labels, n_clients, seed, **({"classes_per_client": 3} if name == "classes" else {}))
    assert all(np.array_equal(a, b) for a, b in zip(parts, again, strict=True))


def test_dirichlet_keeps_its_minimum_and_balances():
    labels = np.random.default_rng(0).integers(20, size=4000)
    parts = deal("dirichlet", labels, 10, 0, alpha=0.1)
    assert min(len(part) for part in parts) >= 40  # PFLlib's: min(40, N / 2K)
    assert min(len(part) for part in deal("dirichlet", labels[:400], 10, 0, alpha=1.0)) >= 20
    # Nobody is given a further class once it has a fair share of 400, and one class has about 200 rows.
    assert max(len(part) for part in parts) < 400 + 250


def test_smaller_alpha_is_more_heterogeneous():
    labels = np.random.default_rng(0).integers(10, size=3000)

    def mean_classes(alpha: float) -> float:
        return float(np.mean([len(np.unique(labels[part])) for part in deal("dirichlet", labels, 10, 1, alpha=alpha)]))

    assert mean_classes(0.1) < mean_classes(1.0) < mean_classes(100.0) == 10


def test_classes_gives_each_client_that_many():
    labels = np.random.default_rng(0).integers(10, size=1000)
    parts = deal("classes", labels, 20, 0, classes_per_client=3)
    assert {len(np.unique(labels[part])) for part in parts} == {3}


def test_domains_are_not_mixed():
    labels = np.zeros(90, dtype=int)
    domains = np.repeat(["art", "photo", "sketch"], 30)
    parts = load_partition("domains")(labels, 6, np.random.default_rng(0), domains=domains)
    assert [sorted(set(domains[part])) for part in parts] == [["art"]] * 2 + [["photo"]] * 2 + [["sketch"]] * 2


@pytest.mark.parametrize(
    ("name", "n_clients", "options", "remedy"),
    [
        ("dirichlet", 20, {"alpha": 0.01, "minimum": 19}, "larger --alpha, fewer --clients or a smaller --minimum"),
        ("dirichlet", 20, {"minimum": 50}, "more than the 400 rows"),
        ("dirichlet", 4, {"alpha": -1.0}, "greater than 0"),
        ("dirichlet", 0, {}, "allowed are 1 to 400"),
        ("dirichlet_plain", 50, {"alpha": 0.01}, "larger --alpha"),
        ("classes", 4, {"classes_per_client": 9}, "allowed are 1 to 5"),
        ("classes", 2, {"classes_per_client": 1}, "at least 5 clients"),
        ("iid", 401, {}, "allowed are 1 to 400"),
        ("domains", 3, {}, "use a multiple"),
    ],
)
def test_impossible_draws_stop_with_a_remedy(name, n_clients, options, remedy):
    labels = np.arange(400) % 5
    with pytest.raises(InputError, match=remedy):
        deal(name, labels, n_clients, 0, **options)


def test_given_clients_must_agree_in_number():
    column = np.array(["a", "b", "a", "a"])
    with pytest.raises(InputError, match="names 2"):
        load_partition("given")(np.zeros(4), 3, np.random.default_rng(0), column=column)
    with pytest.raises(InputError, match="did you mean 'dirichlet'"):
        load_partition("dirichlett")


@given(st.integers(1, 60), st.integers(0, 99))
def test_split_is_a_75_25_cut_of_the_rows(n, seed):
    rows = np.arange(100, 100 + n)
    train, test = split(rows, np.random.default_rng(seed), test_fraction=0.25)
    assert np.array_equal(np.sort(np.concatenate([train, test])), rows)
    assert len(test) == n // 4


@given(st.integers(1, 60), st.integers(1, 12), st.integers(0, 99))
def test_split_keeps_groups_together(n, n_groups, seed):
    rng = np.random.default_rng(seed)
    rows, groups = np.arange(n), rng.integers(n_groups, size=n)
    train, test = split(rows, rng, test_fraction=0.25, groups=groups)
    assert np.array_equal(np.sort(np.concatenate([train, test])), rows)
    assert len(train)
    assert not set(groups[train]) & set(groups[test])


def test_split_refuses_a_strange_fraction():
    with pytest.raises(InputError, match="less than 1"):
        split(np.arange(4), np.random.default_rng(0), test_fraction=1.0)
