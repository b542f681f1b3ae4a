"""The weight on the primary between machines: tables for each weight, one choice, and each site's own way."""

from __future__ import annotations

import json
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch

from apfl import load_model
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, status_of
from apfl.federate.inprocess import simulate
from apfl.federate.messages import open_choice, open_publication, open_table, seal_choice, seal_table
from apfl.federate.wire import seal
from apfl.maths.hits import bounded_weights
from apfl.maths.personalise import WEIGHTS
from apfl.methods._streams import own_seed
from apfl.methods.apfl import APFL
from apfl.models.file import read
from tests.federate.federation_toys import LANDMARKS, contribute, keep_the_primary, make_sites, tabulate
from tests.maths.test_weight import MANY, many

NAMES = tuple(map(str, range(MANY)))
METHOD = APFL(d_primary=64, bits=16, normalise="row")  # landmarks, and the weight is chosen: the default


def sites_with_an_odd_one(folder, n: int = 60, k: int = 12) -> list[Site]:
    """Sites of few rows alike, but for the third, whose labels mean something else."""
    made = []
    for at in range(k):
        shard = many(n, 100 + at, odd=at == 2)
        rows = Shard(shard.features.double(), shard.labels)
        made.append(Site(folder / "sites", f"site-{at:02d}", rows, NAMES, rounding_seed=own_seed(3, at)))
    return made


def test_each_site_takes_the_weight_that_the_method_gives_it(tmp_path, monkeypatch, caplog):
    keep_the_primary(monkeypatch)
    # The odd site's table is unlike the others', so a server would bound it, which the method does not.
    monkeypatch.setattr("apfl.federate.choosing._Bounds", lambda ends, n_rows: lambda hits, k: hits)
    sites = sites_with_an_odd_one(tmp_path)
    with caplog.at_level(logging.WARNING):
        made = simulate(sites, Terms("f", method=METHOD, seed=3, class_names=NAMES), tmp_path / "server")
    *_, last = METHOD.rounds([site.train for site in sites], MANY, 3)
    assert last.chosen["weight_per_client"] == [read(path).settings["weight"] for path in made.models]
    assert last.chosen["weight_per_client"][2] == 0
    assert last.chosen["weight_per_client"].count(1.0) == 11
    rows = many(50, 7).features
    for path, model in zip(made.models, last.models, strict=True):
        torch.testing.assert_close(load_model(path).scores(rows), model.scores(rows), rtol=0, atol=1e-9)
    assert (last.bytes_up, last.bytes_down) == (made.payload_up, made.payload_down)
    assert status_of(tmp_path / "server")["phase"] == "published"
    (note,) = (each.message for each in caplog.records if each.message.startswith("note: with weight"))
    assert "with weight 0 on the primary of publication 1 clearly more" in note


def test_a_given_weight_is_that_of_the_method(tmp_path, monkeypatch):
    keep_the_primary(monkeypatch)
    sites, method = sites_with_an_odd_one(tmp_path, k=3), replace(METHOD, weight=0.5)
    made = simulate(sites, Terms("f", method=method, seed=3, class_names=NAMES), tmp_path / "server")
    *_, last = method.rounds([site.train for site in sites], MANY, 3)
    rows = many(50, 7).features
    for path, model in zip(made.models, last.models, strict=True):
        torch.testing.assert_close(load_model(path).scores(rows), model.scores(rows), rtol=0, atol=1e-9)


def test_going_alone_is_the_last_guard(tmp_path):
    """The odd site leaves the primary by its weight; its own landmarks are then what it is compared with."""
    sites = sites_with_an_odd_one(tmp_path)
    made = simulate(sites, Terms("f", method=METHOD, seed=3, class_names=NAMES), tmp_path / "server")
    told = read(made.models[2]).settings
    assert told["weight"] == 0
    test = many(500, 7, odd=True)
    right = float((load_model(made.models[2]).scores(test.features).argmax(1) == test.labels).double().mean())
    assert right > 0.5  # with the others' primary alone a row is right by chance, one of eight


def running(tmp_path):
    sites = make_sites(tmp_path)
    server = Coordinator(tmp_path / "server", Terms("f", method=LANDMARKS))
    agreement = contribute(server, sites)
    server.publish()
    return server, sites, agreement


def test_a_table_has_a_part_for_each_weight_and_no_other_shape_is_taken(tmp_path):
    server, sites, agreement = running(tmp_path)
    with server:
        publication = server.deliver("site-1")
        table = open_table(sites[1].table(agreement, publication), server.terms).hits
        assert table.shape == (2, 7, 14, 9)
        assert int(table[1, :, 0, 0].max()) == 0  # no primary and no refinement: no score, and no hit
        # Going alone with the largest balance, on the landmarks of the federation, by another route.
        broadcast = open_publication(publication, server.terms)
        phi = sites[1].agreed_landmarks(server.terms).feature_map(server.terms.normaliser()(sites[1].train.features))
        beta = server.terms.grid(broadcast.unit).betas[3]
        hat = phi @ phi.T @ torch.linalg.inv(phi @ phi.T + beta * torch.eye(len(phi), dtype=phi.dtype))
        y = torch.nn.functional.one_hot(sites[1].train.labels, 3).double()
        left = (hat @ y - hat.diagonal()[:, None] * y) / (1 - hat.diagonal())[:, None]
        judged = int((left.argmax(1) == sites[1].train.labels).sum())
        unjudged = 3  # rows with too much leverage in the primary are no hits, whatever the weight
        assert judged - unjudged <= int(table[1, 3, -1, 0]) <= judged
        refused = server.table(seal_table(server.terms, "site-1", 1, table[0]), "site-1")
        assert "must be I64 [2, 7, 14, 9]" in refused.reason
        assert sites[1].what_leaves(agreement).table == 2 * 7 * 14 * 9


def test_a_choice_tells_a_setting_for_each_weight_and_nothing_else_passes(tmp_path):
    server, sites, _ = running(tmp_path)
    with server:
        choice, terms = tabulate(server, sites), server.terms
        told = open_choice(choice, terms)
        assert tuple(told.plan.settings) == WEIGHTS
        assert told.setting == told.plan.settings[told.plan.weight]
        tried = terms.grid(server.ledger.current()["unit"])
        assert all(tried.index(setting) for setting in told.plan.settings.values())
    length = int.from_bytes(choice[:8], "little")
    header = json.loads(json.loads(choice[8 : 8 + length])["__metadata__"]["apfl"])
    for wrong in (
        {"settings": header["settings"][:1]}, {"settings": "all"}, {"settings": [[1.0, 1.0, 1.0]] * 2},
        {"settings": header["settings"][::-1]}, {"weight": 0.5}, {"weight": None}, {"weight": -1.0},
    ):  # fmt: skip
        with pytest.raises(InputError):
            open_choice(seal("choice", {**header, **wrong}, {}), terms)


def test_a_lying_table_does_not_choose_the_weight(tmp_path):
    server, sites, _ = running(tmp_path)
    with server:
        tables = [open_table(site.table(server.settle(), server.deliver(site.name)), server.terms) for site in sites]
        n_rows, hits = [len(site.train) for site in sites], [table.hits.clone() for table in tables]

        def weight(told: list[torch.Tensor]) -> float:
            names = [str(k) for k in range(len(told))]
            sealed = seal_choice(server.terms, 1, 1.0, sum(told, torch.zeros_like(told[0])), names, sum(n_rows))
            return open_choice(sealed, server.terms).plan.weight

        assert weight(hits) == 1
        hits[1][0], hits[1][1] = 0, n_rows[1]  # of 70 of 175 rows: none is right with the primary, all without
        assert weight(hits) == 0
        assert weight(bounded_weights(hits, n_rows)) == 1


def test_tables_of_weights_that_are_alike_are_left_as_they_are():
    rng = np.random.default_rng(0)
    tables = [torch.from_numpy(rng.integers(80, 91, size=(2, 3, 4, 5))) for _ in range(5)]
    for table in tables:
        table[0, 0, 0, 0], table[1, 0, 0, 0], table[0, 0, 0, 1], table[1, 0, 0, 1] = 90, 88, 80, 80
        table[1] = table[1].clamp_max(88)
    assert all(map(torch.equal, bounded_weights(tables, [100] * 5), tables))
    assert all(map(torch.equal, bounded_weights(tables[:2], [100] * 2), tables))
