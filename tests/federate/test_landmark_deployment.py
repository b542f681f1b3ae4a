"""A landmark federation with real processes, TLS and keys; one site is killed once its moments are counted."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch

from apfl import load_model
from apfl.federate import Terms
from apfl.federate.contribution import decode
from apfl.federate.inprocess import payload_bytes
from apfl.federate.landmarks import load_landmarks
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_publication
from apfl.maths.ridge import one_hot, solve, statistics
from apfl.methods.apfl import APFL
from apfl.models.landmark import LandmarkModel
from tests.federate.world import CLASSES, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = pytest.mark.deployment

AGREED = {"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.0}
SETTINGS = {"map": "landmarks", "bits": 16, "d_primary": 128, "normalise": "columns", **AGREED}


def test_moments_integers_and_landmarks_between_processes(tmp_path):
    with world(tmp_path, ["a", "b", "c"], quorum=2, max_share=1, **SETTINGS) as w:
        w.server()
        for name in "abc":
            w.join(name)
        w.connected(*"abc")
        run = w.run()
        w.until(lambda: w.seen("answered", client="c", phase="spread"), "the moments of c")
        w.kill("c")
        (w.folder / "keys" / "c.pub").unlink()  # or the run would wait for it until the deadline
        w.finish(run)
        assert [e["members"] for e in w.seen("published")] == [["a", "b"]]
        assert [e["clients"] for e in w.seen("settled")] == [["a", "b", "c"]]
        shards = {name: w.train[name] for name in "abc"}
        homes = {name: w.root / name / "site" / "server" / name for name in "abc"}
        ledger = Ledger(w.folder, writer=False)
        try:
            terms, (row,) = Terms.from_json(ledger.get("terms")), ledger.publications()
            landmarks = load_landmarks(ledger, terms)
            published = open_publication(ledger.blobs.read(row["blob"], row["sha256"]), terms)
        finally:
            ledger.close()
        with closing(sqlite3.connect(w.folder / "ledger.sqlite")) as database:
            described = dict(database.execute("SELECT client, data FROM descriptions").fetchall())
    # The primary is that of the integers that crossed the network, added in one process.
    sent = {name: next(homes[name].glob("sent-*.safetensors")).read_bytes() for name in "ab"}
    encoding = landmarks.encoding(terms)
    summed = sum(decode(data, terms).integers for data in sent.values())
    expected = solve(encoding.decode(torch.from_numpy(summed)), 1.0)
    step = expected.abs().amax(0) / 32767  # 16 bits for each column; the last digit may round otherwise
    assert bool(((published.weights - expected).abs() <= 0.51 * step).all())
    # Without rounding it is that of the rows: an entry is wrong by a step of 0.07 in units of its column at most.
    phis = {name: landmarks.feature_map(terms.normaliser()(shards[name].features)) for name in "ab"}
    exact = [statistics(phis[name], one_hot(shards[name].labels, len(CLASSES))) for name in "ab"]
    unrounded = solve(exact[0] + exact[1], 1.0)
    phi = torch.cat([*phis.values()]).double()
    assert float((phi @ (published.weights - unrounded)).abs().max()) < 0.05  # of scores near 0 and 1
    # The method in one process rounds by other seeds: a number of a landmark may be rounded to the next of its 15.
    method = APFL(**SETTINGS)
    clients = [shards[name] for name in "abc"]
    made_of = method.streams(clients, len(CLASSES), 0)
    moved = made_of.primary_map.landmarks - landmarks.feature_map.landmarks
    assert float(moved.abs().max()) < 0.15
    *_, last = method.rounds(clients, len(CLASSES), 0)
    for name in "ab":
        up = [described[name], next(homes[name].glob("spread-*")).read_bytes(), sent[name]]
        down = [
            next(homes[name].glob("landmarks-*")).read_bytes(),
            (homes[name] / "publication.safetensors").read_bytes(),
        ]
        # Integers are packed in as many bits as they need, and those of each site are its own.
        assert 3 * sum(map(payload_bytes, up)) == pytest.approx(last.bytes_up, rel=0.05)
        told = 8 * (len(terms.mean or ()) + len(terms.std or ()))  # with the terms
        assert 3 * (sum(map(payload_bytes, down)) + told) == last.bytes_down
        model = load_model(homes[name] / "model.safetensors")
        assert isinstance(model, LandmarkModel)
        right = model.scores(w.test[name].features).argmax(1) == w.test[name].labels
        assert float(right.float().mean()) > 0.9
    assert not np.array_equal(decode(sent["a"], terms).integers, decode(sent["b"], terms).integers)


def test_a_pilot_between_processes(tmp_path):
    """A site is killed while the pilot waits for tables: the others' tables choose."""
    settings = {**SETTINGS, "normalise": "auto", "sketch": 16}
    with world(tmp_path, ["a", "b", "c"], quorum=2, max_share=1, **settings) as w:
        w.server()
        for name in "abc":
            w.join(name)
        w.connected(*"abc")
        run = w.run()
        w.until(lambda: w.seen("answered", client="c", phase="pilot"), "the pilot's statistics of c")
        w.kill("c")
        (w.folder / "keys" / "c.pub").unlink()  # or the run would wait for it until the deadline
        w.finish(run)
        assert [e["members"] for e in w.seen("published")] == [["a", "b"]]
        assert len(w.seen("tried")) == 1
        (piloted,) = w.seen("piloted")
        ledger = Ledger(w.folder, writer=False)
        try:
            terms = Terms.from_json(ledger.get("terms"))
        finally:
            ledger.close()
    assert dict(terms.pilot) == piloted["hits"]
    assert terms.method.normalise == piloted["normalise"]
    method = APFL(**settings)
    *_, last = method.rounds([w.train[name] for name in "abc"], len(CLASSES), 0)
    assert set(last.chosen["pilot"]["hits"]) == set(piloted["hits"])
