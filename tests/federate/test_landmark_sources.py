"""Landmarks of a federation from a file of public features, and landmarks that are drawn anew when a site leaves."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from apfl import load_model
from apfl.cli.federate import _agree
from apfl.errors import InputError
from apfl.federate import Coordinator, Terms, status_of
from apfl.federate.inprocess import simulate
from apfl.federate.landmarks import load_landmarks
from apfl.federate.ledger import Ledger
from apfl.federate.site import Site
from apfl.methods.apfl import APFL
from apfl.report.status import status_view
from tests.commands import here
from tests.federate.federation_toys import (
    FIXED,
    LANDMARKS,
    PILOT,
    contribute,
    describe,
    draw_shard,
    keep_the_primary,
    make_sites,
    same,
    seeded,
    seen,
)


def public_file(folder, n: int = 90, width: int = 8):
    path = folder / "public.npz"
    np.savez(path, features=draw_shard(n, 77, width).features.numpy().astype(np.float32))
    return path


# ------------------------------------------------------------------------------------------------------ from a file


@pytest.mark.parametrize("method", [LANDMARKS, replace(PILOT, normalise="auto")], ids=["stated", "pilot"])
def test_models_and_bytes_are_those_of_the_method(tmp_path, monkeypatch, method):
    keep_the_primary(monkeypatch)
    sites, path = seeded(tmp_path, 3), public_file(tmp_path)
    method = replace(method, landmarks=str(path))
    made = simulate(sites, Terms("f", method=method, seed=3), tmp_path / "server")
    *_, last = method.rounds([site.train for site in sites], 3, 3)
    rows = sites[0].test.features
    for own, model in zip(made.models, last.models, strict=True):
        torch.testing.assert_close(load_model(own).scores(rows), model.scores(rows), rtol=0, atol=1e-9)
    assert (last.bytes_up, last.bytes_down) == (made.payload_up, made.payload_down)
    terms = status_of(tmp_path / "server")["terms"]
    told = last.chosen["landmarks"]
    assert (terms["public_sha256"], terms["public_rows"]) == (told["sha256"], told["rows"] == 90 and 90)


def test_sites_only_see_landmarks_and_the_server_needs_the_file_once(tmp_path):
    sites, path = make_sites(tmp_path), public_file(tmp_path)
    draft = Terms("f", method=replace(LANDMARKS, landmarks=str(path)))
    with Coordinator(tmp_path / "server", draft) as server:
        path.unlink()
        invitation = server.invitation()
        assert str(tmp_path) not in invitation.decode()
        for site in sites:
            assert server.describe(site.describe(invitation), site.name).ok
        server.outline()
        assert not server.spreading
        lines = sites[0].what_leaves(invitation).lines()
        assert any("draws them from a file of public features that it has (90 rows, SHA-256 " in each for each in lines)
        assert not any("from which the server draws landmarks" in each for each in lines)
    with Coordinator(tmp_path / "server") as server:  # killed in between: the features are in the folder
        contribute(server, sites)
        server.publish()
        assert not any("landmarks" in each for each in server.leave("site-1").remains)
        with pytest.raises(InputError, match="none were drawn here from the members' moments"):
            server.redraw()
    with (console := Console(width=200)).capture() as shown:
        console.print(status_view(status_of(tmp_path / "server")))
    assert "landmarks from a file of public features (90 rows, SHA-256 " in shown.get()


def test_the_same_file_is_the_same_terms_and_another_is_not(tmp_path):
    path = public_file(tmp_path)
    given = {"method": {"landmarks": str(path), "d_primary": 16}}
    draft = _agree(tmp_path / "server", "f", json.loads(json.dumps(given)))
    assert (draft.method.landmarks, draft.n_features, draft.public_rows) == ("public", 8, 90)
    assert _agree(tmp_path / "server", "f", json.loads(json.dumps(given))) == draft
    public_file(tmp_path, 91)
    with pytest.raises(InputError, match="has other terms"):
        _agree(tmp_path / "server", "f", json.loads(json.dumps(given)))


def test_bad_files_and_terms_are_refused_in_a_sentence(tmp_path):
    with pytest.raises(InputError, match=r"landmarks=.*missing.npz given; allowed"):
        APFL(landmarks=str(tmp_path / "missing.npz"))
    narrow = APFL(d_primary=16, landmarks=str(public_file(tmp_path, width=5)))
    with pytest.raises(InputError, match="has 5 features, the terms state 8"):
        Coordinator(tmp_path / "a", Terms("f", method=narrow, n_features=8))
    with Coordinator(tmp_path / "b", Terms("f", method=narrow)) as server:
        (site,) = make_sites(tmp_path, (30,))
        with pytest.raises(InputError, match="features of width 8 given; the federation agreed on 5"):
            site.describe(server.invitation())
    with pytest.raises(InputError, match="the hash of no file"):
        Terms("f", method=APFL(landmarks="public"))
    with pytest.raises(InputError, match="the hash of a file"):
        Terms("f", method=APFL(), public_sha256="0" * 64, public_rows=3)
    with pytest.raises(InputError, match="Name the file"):
        next(APFL(landmarks="public", d_primary=16, normalise="row").rounds([draw_shard(30, 0)], 3, 0))


# ------------------------------------------------------------------------------------------------------- drawn anew


def published(server: Coordinator, sites: list[Site]):
    contribute(server, sites)
    return seen(server.publish(), server.terms), load_landmarks(server.ledger, server.terms).feature_map


@pytest.mark.parametrize("method", [LANDMARKS, PILOT], ids=["stated", "pilot"])
def test_drawn_anew_all_is_as_if_the_site_had_never_been_there(tmp_path, method):
    sites, others = make_sites(tmp_path), [make_sites(tmp_path / "apart")[k] for k in (0, 2, 3)]
    for site in (*sites, *others):
        site.rounding_seed = int(site.name[-1])
    with Coordinator(tmp_path / "apart" / "server", Terms("f", method=method, min_cohort=2)) as server:
        expected, drawn = published(server, others)
        digest = server.terms.digest
    with Coordinator(tmp_path / "server", Terms("f", method=method, min_cohort=2)) as server:
        former, kept = published(server, sites)
        evidence = server.leave("site-1")
        assert "the landmarks, drawn from sums of everyone's normalised rows" in evidence.remains
        assert torch.equal(load_landmarks(server.ledger, server.terms).feature_map.points, kept.points)  # by default
        server.redraw()
        assert not server.settled
        assert server.current() is None
        assert server.status()["phase"] == "describing"
        assert {row["state"] for row in server.status()["clients"]} == {"described", "gone"}
    with Coordinator(tmp_path / "server") as server:
        rest = [site for site in sites if site.name != "site-1"]
        found, anew = published(server, rest)
        assert server.terms.digest == digest
        assert found.number == former.number + 2
        assert torch.equal(anew.points, drawn.points)
        assert not torch.equal(anew.points, kept.points)
        assert same(replace(found, number=1), expected)
        assert sorted(path.name.split("-")[0] for path in (tmp_path / "server" / "blobs").iterdir()) == sorted(
            ["landmarks.safetensors", "publication", "sum", *["contribution"] * 3]
        )


def test_the_command_draws_landmarks_anew_and_says_so(tmp_path, capsys):
    sites, folder = make_sites(tmp_path), tmp_path / "server"
    with Coordinator(folder, Terms("f", method=LANDMARKS)) as server:
        published(server, sites)
    assert here("federate", "leave", folder, "site-1") == 0
    assert "not undone: the landmarks, drawn from sums of everyone's normalised rows" in capsys.readouterr().out
    assert here("federate", "leave", folder, "site-1", "--new-landmarks") == 0  # after the fact, or a kill
    said = capsys.readouterr().out
    assert "the next run asks the others again and draws new ones" in said
    ledger = Ledger(folder, writer=False)
    assert ledger.get("terms") is None
    ledger.close()
    with Coordinator(folder) as server:
        describe(server, [sites[k] for k in (0, 2, 3)])
    assert here("federate", "forget", folder, "site-2", "--new-landmarks") == 0
    said = capsys.readouterr().out
    assert "not undone" not in said
    assert "Until then there is no primary" in said
    assert here("federate", "leave", folder, "site-3", "--new-landmarks") == 2
    assert "none were drawn here" in capsys.readouterr().err
    with Coordinator(tmp_path / "random", Terms("f", method=FIXED)) as server:
        contribute(server, sites)
        with pytest.raises(InputError, match="none were drawn here"):
            server.redraw()
