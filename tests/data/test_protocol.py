"""Clients that come after training, and clients whose rows change hands."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch

from apfl.data import load_dataset
from apfl.data.federation import Federation, Shard
from apfl.data.partition import load_partition
from apfl.data.protocol import apart, deal, feature_names, protocol_of
from apfl.errors import InputError
from apfl.experiments.run import Protocol, federate, run
from apfl.maths.leaveout import fit_refinement
from apfl.maths.maps import random_map
from apfl.maths.normalise import Normaliser
from apfl.maths.ridge import one_hot, solve, statistics, total
from apfl.methods import load_method

UNSEEN = Protocol(n_clients=8, alpha=0.5, unseen_clients=3)
SMALL = {"d_primary": 48, "d_refinement": 32}


@pytest.fixture(scope="module")
def digits():
    dataset = load_dataset("digits")
    return replace(dataset, features=dataset.features.double())


def measured(name, dataset, protocol, federation=None, **settings):
    federation = federation or federate(dataset, protocol, seed=0)
    return run(name, load_method(name, **settings), federation, dataset, protocol, seed=0)


def test_unseen_clients_alone_are_measured(digits):
    record, models = measured("afl", digits, UNSEEN)
    assert len(models) == len(record.client_accuracies) == len(record.n_train) == 3
    assert record.n_clients == 8
    everyone = measured("afl", digits, replace(UNSEEN, unseen_clients=0))[0]
    for name, rows in zip(record.client_names, record.n_train, strict=True):  # the same clients as without
        assert everyone.n_train[int(name)] == rows


@pytest.mark.parametrize(("name", "settings"), [("afl", {}), ("fedavg", {"n_rounds": 3}), ("central", {"d": 32})])
def test_a_shared_model_knows_nothing_of_unseen_clients(digits, name, settings):
    """Their labels turned round: the model they are given stays the same."""
    federation = federate(digits, UNSEEN, seed=0)
    late = {id(shard) for shard in apart(federation, UNSEEN, 0)[1].train}
    turned = [Shard(s.features, (s.labels + 1) % 10) if id(s) in late else s for s in federation.train]
    other = Federation(turned, federation.test, federation.class_names, federation.names)
    a, b = (measured(name, digits, UNSEEN, each, **settings)[1][0] for each in (federation, other))
    rows = digits.features[:20]
    assert torch.equal(a.scores(rows), b.scores(rows))


def test_an_unseen_client_fits_its_refinement_to_the_primary_of_the_others(digits):
    """By the paper's formulas, from the rows."""
    federation = federate(digits, UNSEEN, seed=0)
    seen, late = apart(federation, UNSEEN, 0)
    phi, psi = (random_map(64, width, "relu", seed) for width, seed in ((48, 0), (32, 1)))
    normalise = Normaliser("row")
    parts = [statistics(phi(normalise(s.features)), one_hot(s.labels, 10)) for s in seen.train]
    primary = solve(total(parts), 1.0)
    own = late.train[1]
    residual = one_hot(own.labels, 10) - phi(normalise(own.features)) @ primary
    refinement = fit_refinement(psi(normalise(own.features)), residual, 1.0)
    z = normalise(late.test[1].features)
    expected = phi(z) @ primary + 0.5 * psi(z) @ refinement
    _, models = measured("apfl_paper", digits, UNSEEN, federation, **SMALL)
    torch.testing.assert_close(models[1].scores(late.test[1].features), expected, rtol=0, atol=1e-9)
    fixed = {
        "gamma": 1.0,
        "beta": 1.0,
        "balance": 0.5,
        "tau": 0.0,
        "map": "random",
        "activation_primary": "relu",
        "activation_refinement": "relu",
        "normalise": "row",
        **SMALL,
    }  # apfl with the paper's settings is the same
    _, models = measured("apfl", digits, UNSEEN, federation, **fixed)
    torch.testing.assert_close(models[1].scores(late.test[1].features), expected, rtol=0, atol=1e-9)


def test_unseen_clients_fine_tune_what_they_are_given(digits):
    shared, _ = measured("fedavg", digits, UNSEEN, n_rounds=3)
    still, _ = measured("fedavg_ft", digits, UNSEEN, n_rounds=3, finetune_epochs=0)
    tuned, _ = measured("fedavg_ft", digits, UNSEEN, n_rounds=3, finetune_epochs=20)
    assert still.client_accuracies == shared.client_accuracies
    assert tuned.accuracy_client_mean > shared.accuracy_client_mean


def test_methods_without_a_model_for_them_are_refused(digits):
    with pytest.raises(InputError, match="no model for clients unseen"):
        measured("ditto", digits, UNSEEN, n_rounds=1)
    with pytest.raises(InputError, match="scope='federation'"):
        measured("apfl", digits, UNSEEN, scope="client", map="random", **SMALL)


def test_reshuffling_keeps_the_first_client_and_the_union(digits):
    protocols = [Protocol(n_clients=6, alpha=0.3, reshuffle=n) for n in (0, 1, 2)]
    dealt = [deal(digits, protocol, seed=0) for protocol in protocols]
    plain = deal(digits, Protocol(n_clients=6, alpha=0.3), seed=0)
    for halves in dealt:
        assert len(halves) == 6
        assert all(np.array_equal(a, b) for a, b in zip(halves[0], plain[0], strict=True))
        union = np.sort(np.concatenate([train for train, _ in halves]))
        assert np.array_equal(union, np.sort(np.concatenate([train for train, _ in plain])))
    assert not np.array_equal(dealt[0][1][0], dealt[1][1][0])
    assert not np.array_equal(dealt[1][1][0], dealt[2][1][0])


@pytest.mark.parametrize(
    ("name", "settings", "moves"),
    [
        ("apfl_paper", SMALL, False),
        ("apfl", {"scope": "client", "map": "random", **SMALL}, False),
        ("fedavg_ft", {"n_rounds": 3}, True),
    ],
)
def test_theorem_3_in_records(digits, name, settings, moves):
    scores = [
        measured(name, digits, Protocol(n_clients=6, alpha=0.3, reshuffle=n), **settings)[0].first_client_scores
        for n in (0, 1)
    ]
    # Sums in another order, through a system of condition about 1e4.
    assert (abs(scores[1] / scores[0] - 1) > 1e-4) == moves
    if not moves:
        assert scores[1] == pytest.approx(scores[0], rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"unseen_clients": 8}, "at least one must train"),
        ({"unseen_clients": -1}, "at least one must train"),
        ({"unseen_clients": 2, "reshuffle": 1}, "none unseen"),
        ({"unseen_clients": 0, "reshuffle": -1}, "0 or more"),
        ({"unseen_clients": 0, "reshuffle": 1, "n_clients": 2}, "at least three clients"),
        ({"minimum": 0}, "it must be 1 or more"),
        (
            {"unseen_clients": 0, "reshuffle": 1, "partition": "given", "client_column": "site", "n_clients": None},
            "again",
        ),
    ],
)
def test_protocols_that_make_no_sense_are_refused(digits, changes, message):
    dataset = replace(digits, columns={"site": np.arange(1797) % 8})
    with pytest.raises(InputError, match=message):
        deal(dataset, replace(UNSEEN, **changes), seed=0)


@pytest.mark.parametrize(
    "changes", [{"minimum": 1}, {"unseen_clients": 7}, {"unseen_clients": 0, "n_clients": 3, "reshuffle": 1}]
)
def test_protocols_that_just_make_sense_are_dealt(digits, changes):
    protocol = replace(UNSEEN, **changes)
    halves = deal(digits, protocol, seed=0)
    assert len(halves) == protocol.n_clients
    assert min(len(train) for train, _ in halves) >= 1


@pytest.mark.parametrize(
    ("values", "rows"),
    [
        (np.array(["a", "", "b"] * 599), "1, 4, 7, 10, 13, ..."),
        (np.where(np.arange(1797) == 5, np.nan, 1.0), "5"),
        (np.array([None, *["a"] * 1796], dtype=object), "0"),
    ],
)
def test_missing_clients_groups_and_flags_are_refused_only_if_used(digits, values, rows):
    dataset = replace(digits, columns={"site": values})
    assert len(deal(dataset, Protocol(n_clients=4, alpha=1.0), seed=0)) == 4
    message = rf"values in column 'site' of digits .* \(rows? {re.escape(rows)}, counted"
    for use in (
        {"partition": "given", "n_clients": None, "client_column": "site"},
        {"partition": "domains", "n_clients": 4, "client_column": "site"},
        {"group_column": "site"},
        {"test_column": "site"},
    ):
        with pytest.raises(InputError, match=message):
            federate(dataset, replace(Protocol(n_clients=4, alpha=1.0), **use), seed=0)


@pytest.mark.parametrize(("name", "argument"), [("given", "column"), ("domains", "domains")])
def test_recipes_refuse_missing_entries(name, argument):
    entries = np.array(["a", "", "b", "b"])
    with pytest.raises(InputError, match=r"1 of 4 \w+ entries is missing \(row 1,"):
        load_partition(name)(np.zeros(4), 2, np.random.default_rng(0), **{argument: entries})


def test_a_client_without_a_name_is_refused(digits):
    federation = federate(digits, Protocol(n_clients=3, alpha=1.0), seed=0)
    with pytest.raises(InputError, match=r"1 of 3 client names is missing \(row 1,"):
        Federation(federation.train, federation.test, federation.class_names, ["a", "", "b"])


def test_given_clients_have_the_names_of_their_column_and_others_numbers(digits):
    dataset = replace(digits, columns={"site": np.array(["b", "a", "c"])[np.arange(1797) % 3]})
    given = Protocol("given", None, client_column="site")
    assert list(federate(dataset, given, 0).names) == ["a", "b", "c"]
    assert list(federate(dataset, Protocol("domains", 3, client_column="site"), 0).names) == ["0", "1", "2"]


def test_a_test_column_says_yes_or_no(digits):
    flags = np.arange(1797) % 4 == 0
    for column in (flags, flags.astype(int), np.where(flags, "test", "train")):
        dataset = replace(digits, columns={"held": column})
        for train, test in deal(dataset, Protocol("iid", 3, test_column="held"), 0):
            assert flags[test].all()
            assert not flags[train].any()
    for column in (flags + 1, np.arange(1797) % 3, np.where(flags, "later", "train")):
        with pytest.raises(InputError, match="held"):
            deal(replace(digits, columns={"held": column}), Protocol("iid", 3, test_column="held"), 0)


def test_a_federation_has_the_rows_that_were_dealt(digits):
    groups = np.arange(1797) // 3
    dataset = replace(digits, columns={"patient": groups + 100})
    protocol = Protocol("iid", 4, test_fraction=0.4, group_column="patient")
    federation, halves = federate(dataset, protocol, 3), deal(dataset, protocol, 3)
    assert sorted(np.concatenate([rows for half in halves for rows in half])) == list(range(1797))
    for shards, side in ((federation.train, 0), (federation.test, 1)):
        for shard, half in zip(shards, halves, strict=True):
            assert torch.equal(shard.features, digits.features[half[side]])
            assert torch.equal(shard.labels, digits.labels[half[side]])
            assert shard.groups.tolist() == groups[half[side]].tolist()
    for train, test in halves:  # a group stays together
        assert not set(groups[train]) & set(groups[test])
        assert len(test) == pytest.approx(0.4 * (len(train) + len(test)), abs=3)
    assert federate(digits, Protocol("iid", 4), 3).train[0].groups is None


def test_who_comes_late_is_drawn_by_a_stream_of_its_own(digits):
    """The seed and a number for the purpose: records made before must find the same clients."""
    federation = federate(digits, UNSEEN, 5)
    seen, late = apart(federation, UNSEEN, 5)
    drawn = sorted(np.random.default_rng((5, 7)).permutation(8)[:3].tolist())
    assert [int(name) for name in late.names] == drawn
    assert [int(name) for name in seen.names] == [k for k in range(8) if k not in drawn]
    for part in (seen, late):
        for train, test, name in zip(part.train, part.test, part.names, strict=True):
            assert train is federation.train[int(name)]
            assert test is federation.test[int(name)]
    assert apart(federation, replace(UNSEEN, unseen_clients=0), 5) == (federation, None)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_others_are_dealt_again_by_a_stream_of_its_own_and_have_no_test_rows(digits, number):
    plain = deal(digits, Protocol(n_clients=6, alpha=0.3), seed=4)
    again = deal(digits, Protocol(n_clients=6, alpha=0.3, reshuffle=number), seed=4)
    assert [len(test) for _, test in again] == [len(plain[0][1]), 0, 0, 0, 0, 0]
    expected = [train for train, _ in plain[1:]]
    if number:
        rest = np.sort(np.concatenate(expected))
        rng = np.random.default_rng((4, number, 8))
        parts = load_partition("dirichlet")(digits.labels.numpy()[rest], 5, rng, alpha=0.3, minimum=None)
        expected = [rest[part] for part in parts]
    assert all(np.array_equal(train, rows) for (train, _), rows in zip(again[1:], expected, strict=True))


def test_a_partition_is_given_what_it_asks_for_and_nothing_else(digits, tmp_path):
    """Its own options keep their defaults, also if there is a client column."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np\n"
        "def partition(labels, n_clients, rng, *, alpha, column, taste='sweet'):\n"
        "    assert (alpha, taste, len(column)) == (0.7, 'sweet', len(labels))\n"
        "    return np.array_split(rng.permutation(len(labels)), n_clients)\n"
        "def without(labels, n_clients, rng, *, taste):\n"
        "    return []\n"
    )
    dataset = replace(digits, columns={"site": np.arange(1797) % 8})
    asks = Protocol(f"{tmp_path}/mine.py:partition", 5, alpha=0.7, client_column="site")
    assert len(deal(dataset, asks, 0)) == 5
    with pytest.raises(InputError, match="name it with --client-column"):
        deal(dataset, replace(asks, client_column=None), 0)
    with pytest.raises(InputError, match="asks for 'taste'; give that a default"):
        deal(dataset, replace(asks, partition=f"{tmp_path}/mine.py:without"), 0)


@pytest.mark.parametrize(
    ("clients", "partition", "column", "expected"),
    [
        (None, None, None, (Protocol.partition, Protocol.n_clients)),
        (5, None, None, (Protocol.partition, 5)),
        (None, None, "hospital", ("given", None)),
        (None, "domains", "hospital", ("domains", Protocol.n_clients)),
        (5, "domains", "hospital", ("domains", 5)),
    ],
)
def test_a_client_column_makes_the_clients_unless_a_partition_is_given(clients, partition, column, expected):
    protocol = protocol_of(clients, 0.1, partition, column)
    assert (protocol.partition, protocol.n_clients, protocol.client_column) == (*expected, column)


def test_columns_that_the_protocol_uses_are_no_features(digits):
    table = replace(digits, feature_names=("age", "hospital", "weight", "later", "patient"))
    protocol = Protocol(client_column="hospital", test_column="later", group_column="patient")
    assert feature_names(table, protocol) == ["age", "weight"]
    assert feature_names(table, Protocol()) == list(table.feature_names)
