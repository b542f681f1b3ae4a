"""A masked federation with real processes, TLS and keys; one site is killed in the middle of the sum of statistics."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import numpy as np
import pytest
import torch

from apfl.federate import Terms
from apfl.federate.contribution import decode
from apfl.federate.landmarks import load_landmarks
from apfl.federate.ledger import Ledger
from apfl.federate.masked.counts import Counts
from apfl.federate.masked.rosters import make_identity
from apfl.federate.messages import open_publication
from apfl.maths.ridge import solve
from apfl.models.file import read
from tests.federate.world import CLASSES, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
# Fifty processes of sites, one for each question: five minutes of those that all deployment tests have.
pytestmark = [pytest.mark.deployment, pytest.mark.slow]

SITES = ("a", "b", "c", "d", "e")
# Two sums, of counts and of statistics: every question starts a process at each site. `test_masked_conversation` has
# all of them.
SETTINGS = {
    "map": "landmarks", "landmarks": "free", "bits": 16, "d_primary": 96, "normalise": "root", "gamma": 1.0,
    "beta": 1.0, "balance": 0.5, "tau": 0.0, "weight": 1.0,
}  # fmt: skip


def test_a_masked_federation_of_five_of_which_one_is_killed(tmp_path):
    with world(
        tmp_path, SITES, masked=True, classes=",".join(CLASSES), n_features=64, max_rows=500, max_share=1, **SETTINGS
    ) as w:
        for name in SITES:  # as `keys --masked` does it beside the key
            make_identity(w.folder / "keys", name)
        made = w.apfl("federate", "roster", w.folder)
        assert "4 of 5 must answer" in made
        w.server()
        roster = w.folder / "rosters" / "001.json"
        for name in SITES:
            identity = w.folder / "keys" / f"{name}.identity"
            w.join(name, "--roster", str(roster), "--identity", str(identity))
        w.connected(*SITES)
        run = w.run()
        w.until(lambda: w.seen("answered", client="c", phase="statistics share"), "the shares of c")
        w.kill("c")
        w.finish(run)
        members = [event["members"] for event in w.seen("published")]
        homes = {name: w.root / name / "site" / "server" / name for name in SITES}
        ledger = Ledger(w.folder, writer=False)
        try:
            terms, (row,) = Terms.from_json(ledger.get("terms")), ledger.publications()
            landmarks = load_landmarks(ledger, terms)
            published = open_publication(ledger.blobs.read(row["blob"], row["sha256"]), terms)
            total = ledger.blobs.tensors(ledger.get("sum"), ledger.get("sum_sha256"))["integers"].numpy()
            counts = Counts.from_bytes(ledger.get("counts " + made.split("fingerprint ")[1].strip()).encode())
        finally:
            ledger.close()
        with closing(sqlite3.connect(w.folder / "ledger.sqlite")) as database:
            for table in ("descriptions", "spreads", "tables", "metrics"):
                assert database.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,)
        status = w.json("federate", "status", w.folder)
    # c is in the counts; it may have sent its masked vector before it was killed.
    assert sum(counts.rows) == sum(len(w.train[name]) for name in SITES)
    (inside,) = members
    assert set(inside) in ({"a", "b", "d", "e"}, set(SITES))
    # The sum is, to the bit, that of the integers that each site keeps to itself.
    sent = [decode(next(homes[name].glob("sent-*.safetensors")).read_bytes(), terms).integers for name in inside]
    np.testing.assert_array_equal(total, sum(sent))
    expected = solve(landmarks.encoding(terms).decode(torch.from_numpy(total)), 1.0)
    torch.testing.assert_close(
        published.weights, expected, rtol=0, atol=2**-15 * float(expected.abs().max())
    )  # 16 bits
    for name in ("a", "b", "d", "e"):
        assert read(homes[name] / "model.safetensors").settings["publication"] == 1
    assert [row["state"] for row in status["clients"] if row["name"] == "a"] == ["member"]
