"""A masked federation with real processes, TLS and keys, of which one site is killed, beside a plain one.

Both are a SuperLink with its SuperNodes. The sites of the second are those behind the sum of the first, with the same
rows and, in a file on their disk, the same seed of rounding.
"""

from __future__ import annotations

import hashlib
import os
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from apfl.federate import Coordinator, Terms
from apfl.federate.contribution import decode
from apfl.federate.masked.counts import Counts
from apfl.federate.masked.rosters import make_identity
from apfl.federate.masked.tables import summed
from apfl.federate.messages import Broadcast, Choice, open_choice, open_table
from apfl.models.file import Container, read
from tests.federate.federation_toys import seen
from tests.federate.world import CLASSES, World, digits_sites, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
# Ninety processes of sites, one for each question: five and a half minutes on two quiet cores.
pytestmark = [pytest.mark.deployment, pytest.mark.slow]

SITES = ("a", "b", "c", "d", "e")
KILLED = "c"
LEFT = tuple(name for name in SITES if name != KILLED)
ROWS = {name: len(rows) for name, rows in digits_sites(SITES)[0].items()}
# Three sums, of counts, of statistics and of tables, from which beta, balance, tau and the weight are chosen: every
# question starts a process at each site. `test_masked_conversation` has all sums. Under these settings the choice is
# clear: that the plain server limits what one table can decide changes it under none of 16 other seeds.
TERMS = {
    "map": "landmarks", "landmarks": "free", "bits": 16, "d_primary": 256, "normalise": "root", "gamma": 1.0,
    "classes": ",".join(CLASSES), "n_features": 64, "max_share": 1, "keep_contributions": False,
    "max_rows": max(ROWS.values()),  # of the largest site: then the plain step of the integers is the same
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a federation came to."""

    terms: Terms
    total: np.ndarray  # the sum of the integers
    published: Broadcast
    choice: Choice
    hits: np.ndarray  # the sum of the tables
    models: dict[str, Container]


def test_a_masked_federation_of_which_a_site_is_killed_equals_the_plain_one_of_the_others(tmp_path):
    with world(tmp_path / "masked", SITES, masked=True, **TERMS) as w:
        keep_seeds(w, SITES)
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
        kill_while_it_masks(w, KILLED)
        w.finish(run)
        members = [event["members"] for event in w.seen("published")]
        with closing(sqlite3.connect(w.folder / "ledger.sqlite")) as database:
            for table in ("descriptions", "spreads", "tables", "metrics"):
                assert database.execute(f"SELECT COUNT(*) FROM {table}").fetchone() == (0,)
        status = w.json("federate", "status", w.folder)
    assert members == [list(LEFT)]  # the others took its masks out of the sum
    assert [row["state"] for row in status["clients"] if row["name"] == "a"] == ["member"]
    masked = outcome_of(w)
    with Coordinator(w.folder) as server:
        counts = Counts.from_bytes(server.ledger.get("counts " + made.split("fingerprint ")[1].strip()).encode())
        (table,) = summed(server.ledger, "table", 1).values()
    assert sum(counts.rows) == sum(ROWS.values())  # it was counted
    assert table == [*masked.hits.reshape(-1).tolist(), sum(ROWS[name] for name in LEFT)]
    # The sum is, to the bit, that of the integers that each site keeps to itself.
    sent = [decode(next(home(w, name).glob("sent-*")).read_bytes(), masked.terms).integers for name in LEFT]
    np.testing.assert_array_equal(masked.total, sum(sent))

    with world(tmp_path / "plain", LEFT, **TERMS) as p:
        for name in LEFT:  # the rows of the first world, which divides them among five
            p.train[name], p.test[name] = w.train[name], w.test[name]
            p.write(name)
        keep_seeds(p, LEFT)
        p.server()
        for name in LEFT:
            p.join(name)
        p.connected(*LEFT)
        p.finish(p.run())
        assert [event["members"] for event in p.seen("published")] == [list(LEFT)]
    check_equal(masked, outcome_of(p))


def home(w: World, name: str) -> Path:
    return w.root / name / "site" / "server" / name


def keep_seeds(w: World, names: Sequence[str]) -> None:
    """As if the sites had drawn these seeds themselves."""
    for name in names:
        home(w, name).mkdir(parents=True)
        (home(w, name) / "rounding.seed").write_text(hashlib.sha256(name.encode()).hexdigest())


def kill_while_it_masks(w: World, name: str) -> None:
    """Kill a site once it has shared its secrets for the sum of statistics, and before its masked vector is sent.

    Its disk hangs when it looks up what it has sent, which it does after the first question and before it masks.
    """
    w.until(lambda: w.seen("answered", client=name, phase="statistics advertise"), f"the keys of {name}")
    os.mkfifo(home(w, name) / "hangs")
    os.replace(home(w, name) / "hangs", home(w, name) / "sent.json")
    w.until(lambda: w.seen("asked", client=name, phase="statistics mask"), f"{name} to be asked for its masked vector")
    w.kill(name)


def outcome_of(w: World) -> Outcome:
    """From the folders of a server that has ended, and of its sites."""
    with Coordinator(w.folder) as server:
        terms, published = server.terms, seen(server.current(), server.terms)
        choice = open_choice(server.choose(), terms)
        if terms.masked:
            (table,) = summed(server.ledger, "table", 1).values()
            hits = np.array(table[:-1]).reshape(terms.table_shape)
        else:
            hits = sum(open_table(row["data"], terms).hits.numpy() for row in server.ledger.tables(1))
        models = {name: read(home(w, name) / "model.safetensors") for name in LEFT}
        return Outcome(terms, server.pool.running().vector.copy(), published, choice, hits, models)


def check_equal(masked: Outcome, plain: Outcome) -> None:
    """The same terms but for the masks, and then all is the same to the bit."""
    assert masked.terms.masked
    assert replace(masked.terms, masked=False) == plain.terms
    np.testing.assert_array_equal(masked.total, plain.total)
    for part in ("weights", "class_counts", "leverage"):
        np.testing.assert_array_equal(*(getattr(each.published, part).numpy() for each in (masked, plain)))
    for part in ("gamma", "unit", "n_samples"):
        assert getattr(masked.published, part) == getattr(plain.published, part), part
    np.testing.assert_array_equal(masked.hits, plain.hits)
    assert (masked.choice.plan, masked.choice.n_samples) == (plain.choice.plan, plain.choice.n_samples)
    assert not all(model.settings["alone"] for model in masked.models.values())  # then the primary would not matter
    for name, model in masked.models.items():
        same = plain.models[name]
        assert model.settings == same.settings
        assert model.settings["publication"] == 1
        assert model.tensors.keys() == same.tensors.keys()
        for part, tensor in model.tensors.items():
            np.testing.assert_array_equal(tensor, same.tensors[part], err_msg=f"{part} of {name}")
