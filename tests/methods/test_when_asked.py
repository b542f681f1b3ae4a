"""Very many clients: models that are made when asked for, and what is kept of each client until all are through."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

import apfl
from apfl.experiments.metrics import client_accuracies
from apfl.maths import leaveout, personalise
from apfl.methods import apfl as method_file
from apfl.methods import load_method
from apfl.methods._analytic import Echoes, repeated_rows
from apfl.methods._when_asked import WhenAsked
from apfl.models.file import Model, load_model
from tests.conftest import draw_clients


def last_round(clients: Sequence[apfl.Shard], **settings: object) -> apfl.methods.Round:
    (only,) = load_method("apfl", **settings).rounds(clients, 3, 0)
    return only


@pytest.fixture
def no_room(monkeypatch):
    """Models of all clients are more than fits."""
    monkeypatch.setattr(method_file, "too_much", lambda n_bytes, device: True)


SETTINGS = [
    {"d_primary": 24, "normalise": "row"},
    {"d_primary": 24, "normalise": "row", "scope": "client"},
    {"map": "random", "d_primary": 24, "d_refinement": 15, "normalise": "row"},
    {"map": "random", "d_primary": 24, "d_refinement": 15, "normalise": "row", "beta": 1.0, "balance": 0.5, "tau": 0.1},
]


@pytest.mark.parametrize("settings", SETTINGS)
def test_models_made_when_asked_are_those_that_would_be_held(settings, request):
    clients = draw_clients([40, 12, 13, 60, 9], 6, 3, 0)
    held = last_round(clients, **settings)
    request.getfixturevalue("no_room")
    asked = last_round(clients, **settings)
    assert isinstance(held.models, list)
    assert isinstance(asked.models, WhenAsked)
    assert held.chosen == asked.chosen
    assert len(asked.models) == len(clients)
    one_by_one, in_part = [asked.models[k] for k in range(5)], asked.models[3:]
    for made in (one_by_one, [*asked.models], [*one_by_one[:3], *in_part]):
        for own, other, shard in zip(made, held.models, clients, strict=True):
            expected = other.scores(shard.features)
            # Refined again by Cholesky; held ones from the decomposition that left rows out.
            torch.testing.assert_close(own.scores(shard.features), expected, rtol=1e-8, atol=1e-8)
    assert client_accuracies(asked.models, clients) == client_accuracies(held.models, clients)


def test_whoever_goes_through_all_has_few_at_a_time():
    asked: list[list[int]] = []

    def make(ks: Sequence[int]) -> list[Model]:
        asked.append([*ks])
        return [str(k) for k in ks]  # type: ignore[misc]

    models = WhenAsked(7, make, 3)
    assert not asked
    assert [*models] == [*"0123456"]
    assert asked == [[0, 1, 2], [3, 4, 5], [6]]
    assert models[-1] == "6"
    with pytest.raises(IndexError):
        models[7]


def test_a_run_measures_and_writes_models_that_were_never_there_together(no_room, tmp_path):
    results = apfl.run(
        "digits", "apfl", clients=4, seeds=1, out=tmp_path, settings={"apfl": {"d_primary": 64, "normalise": "row"}}
    )
    (record,) = results.records
    files = sorted((tmp_path / "models" / "apfl" / "seed-0").glob("client-*.safetensors"))
    assert len(files) == len(record.client_accuracies) == 4
    data = apfl.federation("digits", clients=4)
    models = [load_model(path) for path in files]
    assert client_accuracies(models, data.test) == record.client_accuracies
    assert max(path.stat().st_size for path in files) < 2 * 64 * 10 * 8, "the landmarks stand beside the models, once"


def test_what_hashes_show_of_all_sites_is_made_for_one_client_at_a_time():
    clients = draw_clients([30, 8], 6, 3, 0)
    clients[1] = apfl.Shard(clients[1].features[[0, 1, 1, 2]], clients[1].labels[[0, 1, 1, 2]])
    told = Echoes(repeated_rows(clients))
    assert len(told) == 2
    assert [n_copies for n_copies, _ in told] == [0, 1]
    for (_, own), shard in zip(told, clients, strict=True):
        assert torch.equal(own, leaveout.echo(shard.features))
    assert torch.equal(told[1:][0][1], told[1][1])


def test_rows_that_are_put_together_twice_are_refined_as_if_they_were_kept(monkeypatch):
    """With one map for both streams the decomposition alone is kept of clients that are worked on at once."""
    clients = draw_clients([12, 13, 12, 40], 6, 3, 0)
    kept = last_round(clients, d_primary=24, normalise="row")
    monkeypatch.setattr(personalise, "MOST_KEPT", 0)
    again = last_round(clients, d_primary=24, normalise="row")
    assert kept.chosen == again.chosen
    for own, other in zip(kept.models, again.models, strict=True):
        torch.testing.assert_close(own.weights, other.weights, rtol=1e-8, atol=1e-8)
