"""The federation with real processes: SuperLink, ServerApp and SuperNodes on loopback, TLS and keys on.

Every wait is for a condition. Every process is killed at the end, whatever happened (`world`).
"""

from __future__ import annotations

import json
import os
import signal
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.experiments.run import Protocol, federate
from apfl.federate.inprocess import payload_bytes
from apfl.federate.ledger import Ledger
from apfl.federate.messages import open_publication
from apfl.federate.terms import Terms
from apfl.maths.ridge import one_hot
from apfl.methods.apfl import APFL
from apfl.models.dual_stream import DualStream
from apfl.models.file import read
from tests.federate.world import CLASSES, World, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = pytest.mark.deployment

# Nothing is left to be chosen by tables, so that a run is three messages a site instead of four.
FIXED = {"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.0, "weight": 1.0, "refinement": "in-sample"}


def published(server: Path, number: int | None = None) -> tuple[torch.Tensor, float, Terms, list[str]]:
    """Weights, gamma, terms and members of a publication, the latest unless one is named."""
    ledger = Ledger(server, writer=False)
    try:
        row = [row for row in ledger.publications() if number in (None, row["number"])][-1]
        terms = Terms.from_json(ledger.get("terms"))
        data = ledger.blobs.read(row["blob"], row["sha256"])
        members = list(ledger.members(row["number"]))
        return open_publication(data, terms).weights, row["gamma"], terms, members
    finally:
        ledger.close()


def central_ridge(shards: list[Shard], terms: Terms, gamma: float) -> torch.Tensor:
    """Another route than the server's: least squares on everyone's rows with sqrt(gamma) I below them."""
    phis = [terms.maps(s.features)[0](terms.normaliser()(s.features)).to(torch.float64) for s in shards]
    targets = torch.cat([one_hot(s.labels, terms.n_classes) for s in shards])
    ridge = gamma**0.5 * torch.eye(terms.width, dtype=torch.float64)
    rows = torch.cat([*phis, ridge])
    return torch.linalg.lstsq(rows, torch.cat([targets, targets.new_zeros(terms.width, terms.n_classes)])).solution


def assert_central(w: World, members: list[str], number: int | None = None) -> torch.Tensor:
    """The published primary is central ridge over exactly these sites, and the ledger says so."""
    weights, gamma, terms, told = published(w.folder, number)
    assert told == sorted(members)
    central = central_ridge([w.train[name] for name in sorted(members)], terms, gamma)
    torch.testing.assert_close(weights, central, rtol=1e-9, atol=1e-9)
    return weights


def answers(w: World, phase: str, outcome: str = "accepted") -> Counter[str]:
    return Counter(e["client"] for e in w.seen("answered", phase=phase, outcome=outcome))


def asked_after_accepted(w: World, phase: str) -> list[dict[str, object]]:
    """Questions to sites whose answer was already in the ledger."""
    accepted: set[tuple[str, int]] = set()
    again = []
    for event in w.events():
        if event.get("phase") != phase:
            continue
        if event["event"] == "asked" and (event["client"], event["number"]) in accepted:
            again.append(event)
        if event["event"] == "answered":
            accepted.add((event["client"], event["number"]))
    return again


def model_of(w: World, name: str) -> DualStream:
    return DualStream.load(w.root / name / "site" / "server" / name / "model.safetensors")


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Four sites that have been through one run, with everything chosen by itself."""
    with world(tmp_path_factory.mktemp("federation"), ["a", "b", "c", "d"], d_primary=256) as w:
        w.server()
        for name in "abcd":
            w.join(name)
        w.connected(*"abcd")
        w.finish(w.run())
        yield w


def test_the_primary_is_central_ridge(federation):
    assert_central(federation, ["a", "b", "c", "d"])
    assert answers(federation, "statistics") == dict.fromkeys("abcd", 1)


# Rows from a file are in single precision. The method works on several clients at once, which sums their products in
# another order than a site by itself: 1e-7 of the largest eigenvalue of Psi'Psi, which a small beta makes a thousand
# times as much of the refinement (1e-4 of its largest entry was seen).
SINGLE = 1e-3


def assert_same_refinement(own: DualStream, expected: DualStream) -> None:
    largest = float(expected.refinement.abs().max())
    torch.testing.assert_close(own.refinement, expected.refinement, rtol=0, atol=SINGLE * largest)


def test_personal_models_are_those_of_the_method(federation):
    shards = [federation.train[name] for name in "abcd"]
    *_, last = APFL(map="random", d_primary=256).rounds(shards, len(CLASSES), 0)
    for name, expected in zip("abcd", last.models, strict=True):
        own = model_of(federation, name)
        torch.testing.assert_close(own.primary, expected.primary, rtol=1e-9, atol=1e-9)
        assert_same_refinement(own, expected)
        assert own.balance == expected.balance
        test = federation.test[name].features
        torch.testing.assert_close(own.scores(test), expected.scores(test), rtol=0, atol=SINGLE)


def test_byte_counts_are_what_was_sent(federation):
    status = federation.json("federate", "status", federation.folder)
    sent = {e["client"]: 0 for e in federation.seen("answered")}
    for event in federation.seen("answered"):
        sent[event["client"]] += event["bytes"] if event["phase"] != "refine" else 0
    for row in status["clients"]:
        home = federation.root / row["name"] / "site" / "server" / row["name"]
        (kept,) = home.glob("sent-*.safetensors")
        (answer,) = federation.seen("answered", client=row["name"], phase="statistics")
        assert answer["bytes"] == kept.stat().st_size
        assert row["bytes_up"] == sent[row["name"]]
        (question,) = federation.seen("asked", client=row["name"], phase="table")
        assert question["bytes"] == (home / "publication.safetensors").stat().st_size + len(_terms(federation))
    # Flower's own count of what came in holds ours and little else: its envelopes, and each site's polling.
    runs = json.loads(federation.flwr("list", "federation", "--format", "json"))["runs"]
    inbound = sum(run["network-traffic"]["inbound-bytes"] for run in runs)
    payload = sum(e["bytes"] for e in federation.seen("answered"))
    assert payload < inbound < 1.1 * payload + 100_000


def test_simulated_bytes_are_those_sent(federation):
    """The arrays of all that crossed the network are what the method reports for the same clients."""
    terms = Terms.from_json(_terms(federation))
    with closing(sqlite3.connect(federation.folder / "ledger.sqlite")) as ledger:
        kept = ledger.execute("SELECT data FROM descriptions UNION ALL SELECT data FROM tables").fetchall()
    up, down = [data for (data,) in kept], []
    for name in "abcd":
        home = federation.root / name / "site" / "server" / name
        up += [path.read_bytes() for path in home.glob("sent-*.safetensors")]
        down.append((home / "publication.safetensors").read_bytes())
    assert (len(up), len(down)) == (12, 4)
    *_, last = APFL(map="random", d_primary=256).rounds([federation.train[name] for name in "abcd"], len(CLASSES), 0)
    assert last.bytes_up == sum(map(payload_bytes, up))
    # The choice is a header alone; the mean and the standard deviation come with the terms.
    assert last.bytes_down == sum(map(payload_bytes, down)) + 4 * 8 * (len(terms.mean or ()) + len(terms.std or ()))


def _terms(w: World) -> bytes:
    ledger = Ledger(w.folder, writer=False)
    try:
        return ledger.get("terms").encode()
    finally:
        ledger.close()


def test_the_model_predicts_offline_at_its_site(federation, tmp_path):
    model = federation.root / "a" / "site" / "server" / "a" / "model.safetensors"
    shard = federation.test["a"]
    np.savez(tmp_path / "rows.npz", features=shard.features.numpy(), labels=shard.labels.numpy(), class_names=CLASSES)
    said = federation.apfl("predict", model, tmp_path / "rows.npz", "--out", tmp_path / "predicted.csv")
    (reported,) = [
        row for row in federation.json("federate", "status", federation.folder)["clients"]
        if row["name"] == "a"
    ]  # fmt: skip
    assert f"accuracy {reported['accuracy']:.4f}" in said
    assert read(model).settings["class_names"] == CLASSES


def test_an_unknown_key_is_refused(federation, tmp_path):
    federation.apfl("federate", "keys", tmp_path, "--site", "stranger")
    federation.train["stranger"], federation.test["stranger"] = federation.train["a"], federation.test["a"]
    federation.write("stranger")
    words = ["federate", "join", "--server", f"127.0.0.1:{federation.port}", "--name", "stranger", "--yes"]
    words += ["--data", federation.root / "stranger" / "features.npz", "--folder", tmp_path / "site"]
    words += ["--ca", federation.folder / "keys/ca.crt", "--key", tmp_path / "stranger.key", "--patience", "1"]
    process = federation.start("stranger", words)
    federation.until(lambda: process.poll() is not None, "the stranger to be turned away")
    assert process.returncode == 2
    assert "does not admit the key of stranger" in federation.log("stranger")
    status = federation.json("federate", "status", federation.folder)
    assert [row["name"] for row in status["clients"]] == ["a", "b", "c", "d"]


def test_a_site_runs_no_code_that_the_server_sends(federation, tmp_path):
    app = federation.folder / "flower" / "app" / "pyproject.toml"
    foreign = tmp_path / "intruder"
    foreign.mkdir()
    (foreign / "pyproject.toml").write_text(app.read_text().replace("apfl.federate.flower.server_app", "intruder"))
    (foreign / "intruder.py").write_text(INTRUDER)
    federation.flwr("run", str(foreign), "federation")
    log = federation.root / "a" / "site" / "supernode.log"
    federation.until(lambda: "refused run" in log.read_text(), "the site to refuse the app")


INTRUDER = """
import time
from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()

@app.main()
def main(grid, context):
    grid.push_messages([Message(RecordDict(), node, "query.describe") for node in grid.get_node_ids()])
    time.sleep(20)
"""


def test_a_late_site_is_folded_in_and_leaves_without_a_trace(federation):
    before = assert_central(federation, ["a", "b", "c", "d"])
    federation.train["e"], federation.test["e"] = federation.test["d"], federation.test["a"]
    federation.write("e")
    federation.apfl("federate", "keys", federation.folder / "keys", "--site", "e")
    federation.until(lambda: "admitted e" in federation.log("server"), "the server to admit e")
    assert "e" not in federation.json("federate", "status", federation.folder)["contacts"]
    federation.join("e")
    federation.connected("e")
    contacts = federation.json("federate", "status", federation.folder)["contacts"]
    assert [name for name, contact in contacts.items() if contact["connected"]] == ["a", "b", "c", "d", "e"]
    federation.finish(federation.run())
    assert_central(federation, ["a", "b", "c", "d", "e"])
    assert f"publication 2 of server: {federation.root}/e/site/server/e/model.safetensors" in federation.log("e")
    assert answers(federation, "statistics") == dict.fromkeys("abcde", 1)
    assert asked_after_accepted(federation, "statistics") == []
    assert read(federation.root / "a" / "site" / "server" / "a" / "model.safetensors")
    evidence = federation.json("federate", "leave", federation.folder, "e")
    assert evidence["difference"] == 0.0
    assert evidence["deleted"] == [2]
    assert evidence["holders"] == ["a", "b", "c", "d"]
    assert "e" not in json.loads((federation.folder / "flower" / "registered.json").read_text())
    federation.until(lambda: "e has left the federation at 127.0.0.1" in federation.log("e"), "e to be told")
    # As if it had never been there, to the last bit: the sum is of integers.
    assert torch.equal(assert_central(federation, ["a", "b", "c", "d"]), before)


def test_sites_killed_before_during_and_after_their_upload_and_one_too_slow(tmp_path):
    names = ["a", "after", "before", "slow", "during"]  # the last has most rows, and so the longest upload
    with world(tmp_path, names, d_primary=2048, d_refinement=64, quorum=2, **FIXED) as w:
        w.server()
        for name in names:
            w.join(name)
        w.connected(*names)
        with w.stalled("slow"):
            run = w.run("--deadline", 90, "--linger", 200)
            w.until(lambda: w.seen("asked", client="before", phase="statistics"), "before to be asked")
            w.kill("before")
            log = tmp_path / "during" / "site" / "supernode.log"
            (uploading,) = w.pids("during", "apfl.federate.flower.supernode")
            w.until(lambda: "Sending: train.statistics" in log.read_text(), "the upload to begin", pause=0.002)
            os.kill(uploading, signal.SIGKILL)
            w.kill("during")
            told = log.read_text()
            assert "Sent successfully" not in told[told.index("Sending: train.statistics") :]
            w.until(lambda: w.seen("answered", client="after", phase="statistics"), "the upload of after")
            w.kill("after")
            w.until(lambda: w.seen("published", number=1), "the deadline")
            assert_central(w, ["a", "after"], 1)
        w.until(lambda: w.seen("published", number=2), "the late answer")
        assert_central(w, ["a", "after", "slow"], 2)
        assert len(w.seen("asked", client="slow", phase="statistics")) == 1  # the late answer itself was taken
        for name in ("after", "before", "during"):
            w.join(name)
        w.until(lambda: w.seen("published", number=3), "those who were killed")
        w.kill("run")  # only looks on
        w.until(lambda: set(answers_for(w, "refine", published_number(w))) == set(names), "everyone's model")
        assert_central(w, names)
        assert answers(w, "statistics") == dict.fromkeys(names, 1)
        assert asked_after_accepted(w, "statistics") == []
        assert run.poll() is not None


def published_number(w: World) -> int:
    return max(e["number"] for e in w.seen("published"))


def answers_for(w: World, phase: str, number: int) -> list[str]:
    return [e["client"] for e in w.seen("answered", phase=phase, number=number)]


def test_the_server_killed_in_every_phase(tmp_path):
    with world(tmp_path, ["a", "b", "c", "d"], d_primary=256, quorum=4) as w:
        w.server()
        for name in "abcd":
            w.join(name)
        w.connected(*"abcd")
        for phase, app_alone in [("describe", False), ("statistics", True), ("statistics", False), ("table", True),
                                 ("table", False), ("refine", False)]:  # fmt: skip
            before = len(w.seen("answered", phase=phase))
            if not w.pids("server"):
                w.server()
            run = w.run()
            w.until(lambda b=before, p=phase: len(w.seen("answered", phase=p)) > b, f"an answer in {phase}", 0.01)
            w.kill("server", "flwr-serverapp" if app_alone else "")
            w.finish(run, code=2)
            assert "was killed" in w.log("run")
        w.server()
        w.finish(w.run())
        assert_central(w, ["a", "b", "c", "d"])
        for phase in ("describe", "statistics", "table"):
            assert answers(w, phase) == dict.fromkeys("abcd", 1), phase
            assert asked_after_accepted(w, phase) == [], phase
        *_, last = APFL(map="random", d_primary=256).rounds([w.train[name] for name in "abcd"], len(CLASSES), 0)
        for name, expected in zip("abcd", last.models, strict=True):
            assert_same_refinement(model_of(w, name), expected)


def test_a_site_that_answers_twice_counts_once_and_leaves_by_sending_again(tmp_path):
    with world(tmp_path, ["a", "b", "c"], secure=False, keep_contributions=False, d_primary=256, **FIXED) as w:
        w.server()
        w.join("a")
        w.join("a", role="again")  # the same site, started twice
        w.join("b")
        w.join("c")
        w.connected("a", "again", "b", "c")
        w.finish(w.run())
        assert_central(w, ["a", "b", "c"])
        assert answers(w, "statistics") == dict.fromkeys("abc", 1)
        assert answers(w, "statistics", "duplicate") == {"a": 1}
        status = w.json("federate", "status", w.folder)
        assert {row["name"]: row["n"] for row in status["clients"]} == {n: len(w.train[n]) for n in "abc"}
        # The server kept only the sum: to leave, the site sends once more what it sent, and that is subtracted.
        evidence = w.json("federate", "leave", w.folder, "a")
        assert evidence["difference"] is None
        assert evidence["residual"] < 1e-9
        assert_central(w, ["b", "c"])


def test_the_simulation_engine_gives_the_models_of_the_method(tmp_path):
    folder = tmp_path / "simulated"
    words = ["federate", "simulate", "--clients", "3", "--alpha", "1", "--seed", "2", "--set", "map=random"]
    words += ["--set", "d_primary=128"]
    with world(tmp_path, ["unused"], secure=False) as w:
        w.apfl(*words, "--out", folder)
    dealt = federate(load_dataset("digits"), Protocol("dirichlet", 3, 1.0), 2)
    *_, last = APFL(map="random", d_primary=128).rounds(dealt.train, dealt.n_classes, 2)
    for number, expected in enumerate(last.models):
        name = f"site-{number:03d}"
        own = DualStream.load(folder / "sites" / name / "simulated" / name / "model.safetensors")
        assert_same_refinement(own, expected)
        torch.testing.assert_close(own.primary, expected.primary, rtol=1e-9, atol=1e-9)
