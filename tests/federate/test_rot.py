"""Bits that flip on the disk: nothing silently gives another model, and what can be rebuilt is rebuilt."""

from __future__ import annotations

import json
import shutil
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.blobs import FolderError
from apfl.federate.ledger import DIGEST
from apfl.federate.messages import Broadcast, open_choice
from apfl.federate.primary import primary_model
from tests.federate.federation_toys import AUTO, FIXED, contribute, make_sites, same, seen, tabulate

FLIPS = 25  # in each file


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << position % 8
    path.write_bytes(data)


def gone_on(folder: Path, late: bytes) -> tuple[Broadcast, Broadcast]:
    """The publication that sites are sent, and the next one, with a late client."""
    with Coordinator(folder) as server:
        if server.ready():
            server.publish()
        first = seen(server.current(), server.terms)
        assert server.accept(late, "site-3").ok
        return first, seen(server.publish(), server.terms)


@pytest.mark.parametrize("keep", [True, False])
def test_no_flipped_bit_gives_another_model(keep, tmp_path):
    """23 of 40 flips in the sum did, and every flip in the numbers of a publication."""
    sites, folder = make_sites(tmp_path), tmp_path / "server"
    with Coordinator(folder, Terms("f", method=AUTO, keep_contributions=keep)) as server:
        agreement = contribute(server, sites[:3])
        server.publish()
        late = sites[3].statistics(agreement)
    shutil.copytree(folder, tmp_path / "sound")
    expected = gone_on(tmp_path / "sound", late)
    n_flips = 0
    for name in sorted(path.name for path in (folder / "blobs").iterdir()):
        size = (folder / "blobs" / name).stat().st_size
        for position in range(0, size, size // FLIPS):
            shutil.rmtree(tmp_path / "rotten", ignore_errors=True)
            shutil.copytree(folder, tmp_path / "rotten")
            flip(tmp_path / "rotten" / "blobs" / name, position)
            n_flips += 1
            if name.startswith("sum") and not keep:  # it cannot be had again
                with pytest.raises(FolderError, match="changed on disk"):
                    gone_on(tmp_path / "rotten", late)
            else:
                assert all(map(same, gone_on(tmp_path / "rotten", late), expected)), (name, position)
    assert n_flips >= FLIPS * (5 if keep else 2)


def test_a_rebuilt_sum_is_kept_and_reported(tmp_path):
    folder, sites = tmp_path / "server", make_sites(tmp_path)
    with Coordinator(folder, Terms("f", method=FIXED)) as server:
        contribute(server, sites)
        server.publish()
        before = server.pool.running().copy()
    (stored,) = (folder / "blobs").glob("sum-*")
    flip(stored, stored.stat().st_size // 2)
    with Coordinator(folder) as server:
        assert server.pool.running() == before
        assert "rebuilt" in [event["what"] for event in server.status()["events"]]
    with Coordinator(folder) as server:
        assert server.pool.running() == before
        assert [event["what"] for event in server.status()["events"]].count("rebuilt") == 1


def test_a_damaged_publication_is_not_handed_out(tmp_path):
    folder, sites = tmp_path / "server", make_sites(tmp_path)
    with Coordinator(folder, Terms("f", method=FIXED)) as server:
        contribute(server, sites)
        expected = seen(server.publish(), server.terms)
        stored = folder / "blobs" / "publication-1.safetensors"
        flip(stored, stored.stat().st_size - 5)
        with pytest.raises(FolderError, match="publication 1 has changed on disk"):
            server.deliver("site-0")
    with pytest.raises(FolderError, match=f"publish anew: apfl federate run {folder}"):
        primary_model(folder, tmp_path / "primary.safetensors")
    assert not (tmp_path / "primary.safetensors").exists()
    with Coordinator(folder) as server:
        assert server.current() is None
        assert server.ready()
        anew = server.publish()
        assert anew.number == 2
        assert same(seen(anew, server.terms), expected)


def finished(folder: Path, sites: list[Site]) -> tuple[Broadcast, tuple[float, ...], Broadcast]:
    """A federation to its end: the publication, the settings that tables choose, and the publication with one more."""
    with Coordinator(folder) as server:
        agreement = server.settle()
        contribute(server, sites[:3])
        if server.ready():
            server.publish()
        tabulate(server, sites[:3])
        first, chosen = server.current(), open_choice(server.choose(), server.terms).setting
        assert server.accept(sites[3].statistics(agreement), sites[3].name).ok
        return seen(first, server.terms), chosen, seen(server.publish(), server.terms)


@pytest.mark.parametrize("stage", ["described", "published"])
def test_no_flipped_bit_of_the_ledger_gives_another_model(stage, tmp_path):
    """35 of 250 did: most of them in a table of left-out hits, some in an index, by which a client counted twice."""
    sites, folder = make_sites(tmp_path), tmp_path / "server"
    with Coordinator(folder, Terms("f", method=AUTO)) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        if stage == "published":
            contribute(server, sites[:3])
            server.publish()
            tabulate(server, sites[:3])
    shutil.copytree(folder, tmp_path / "sound")
    expected, data = finished(tmp_path / "sound", sites), (folder / "ledger.sqlite").read_bytes()
    used = [position for position, byte in enumerate(data) if byte]  # empty pages have nothing to lose
    outcomes = Counter()
    for position in np.random.default_rng(0).choice(used, 6 * FLIPS, replace=False):
        shutil.rmtree(tmp_path / "rotten", ignore_errors=True)
        shutil.copytree(folder, tmp_path / "rotten")
        flip(tmp_path / "rotten" / "ledger.sqlite", int(position))
        try:
            first, chosen, last = finished(tmp_path / "rotten", sites)
        except InputError:
            outcomes["refused"] += 1
            continue
        outcomes["went on"] += 1
        assert chosen == expected[1], position
        assert same(first, expected[0]), position
        assert same(last, expected[2]), position
    assert outcomes["refused"] > 2 * FLIPS
    assert outcomes["went on"] > 5  # times, events and what a page leaves over decide nothing


@pytest.mark.parametrize(
    "change",
    [
        "UPDATE publications SET unit = unit * 2", "UPDATE tables SET n = n + 1", "UPDATE meta SET value = '1' WHERE "
        "key = 'stale'", "DELETE FROM departed", "UPDATE holders SET confirmed = 7", "DELETE FROM members",
        "UPDATE descriptions SET data = x'00'", "UPDATE tables SET data = x'00'", "UPDATE contributions SET folded = 0",
        "UPDATE sqlite_sequence SET seq = 7", "DROP TABLE metrics",
    ],
)  # fmt: skip
def test_a_ledger_that_changed_on_disk_is_not_opened(change, tmp_path):
    folder, sites = tmp_path / "server", make_sites(tmp_path)
    with Coordinator(folder, Terms("f", method=AUTO)) as server:
        contribute(server, sites)
        server.publish()
        server.leave("site-3")
        server.publish()
        tabulate(server, sites[:3])
        server.confirm("site-0", 2)
    Coordinator(folder).close()
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        assert db.execute(change).rowcount
    with pytest.raises(FolderError, match=r"ledger\.sqlite has changed on disk; restore"):
        Coordinator(folder)


def test_changed_terms_are_refused(tmp_path):
    folder, sites = tmp_path / "server", make_sites(tmp_path)
    with Coordinator(folder, Terms("f", method=FIXED)) as server:
        contribute(server, sites)
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        (stored,) = db.execute("SELECT value FROM meta WHERE key = 'terms'").fetchone()
        changed = json.loads(stored)
        changed["method"]["gamma"] = 3.0
        db.execute("UPDATE meta SET value = ? WHERE key = 'terms'", (json.dumps(changed),))
    with pytest.raises(FolderError, match=r"ledger\.sqlite has changed on disk"):
        Coordinator(folder)
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        db.execute("DELETE FROM meta WHERE key = ?", (DIGEST,))  # a version between kept no other hash of them
    with pytest.raises(FolderError, match=r"terms in .* have changed on disk"):
        Coordinator(folder)


def test_a_folder_without_hashes_still_opens(tmp_path):
    """An earlier version kept none."""
    folder, sites = tmp_path / "server", make_sites(tmp_path)
    with Coordinator(folder, Terms("f", method=FIXED)) as server:
        contribute(server, sites)
        expected = seen(server.publish(), server.terms)
    with closing(sqlite3.connect(folder / "ledger.sqlite")) as db, db:
        hashes = "sum_sha256", "terms_digest", DIGEST
        assert db.execute("DELETE FROM meta WHERE key IN (?, ?, ?)", hashes).rowcount == 3
    with Coordinator(folder) as server:
        assert same(seen(server.current(), server.terms), expected)
        assert server.pool.running().n_samples == expected.n_samples


def test_a_site_does_not_send_what_has_changed_on_its_disk(tmp_path):
    site, *others = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=FIXED)) as server:
        for each in (site, *others):
            server.describe(each.describe(server.invitation()), each.name)
        agreement = server.settle()
        site.statistics(agreement)
        (kept,) = site.home(server.terms).glob("sent-*")
        flip(kept, kept.stat().st_size - 5)
        with pytest.raises(InputError, match="has changed on disk"):
            site.statistics(agreement)
