"""A site leaves a masked federation: its cohort's sum goes, and that of the others is as if it had never joined."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator
from apfl.federate.contribution import decode
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.rosters import read_roster
from tests.commands import here as apfl
from tests.federate.masked.toys import METHOD, masked_sites, masked_terms

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

FIXED = replace(METHOD, gamma=1.0, beta=1.0, balance=0.5, tau=0.0, weight=1.0, landmarks="free", d_primary=24)


def statistics(sites, terms):
    return sum(decode(site.own_statistics(terms), terms).integers for site in sites)


@pytest.mark.parametrize("forget", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_others_sum_up_again_without_it(tmp_path, forget):
    early, late = masked_sites(tmp_path, (70, 60, 60, 50)), masked_sites(tmp_path, (60, 60, 60), start=4)
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        MaskedFederation(server, early).run()
        second = MaskedFederation(server, late)
        second.sum_up()
        server.publish()
        evidence = (server.forget if forget else server.leave)("site-1")
        assert (evidence.deleted, evidence.members, evidence.publication) == ((1, 2), 3, None)
        assert evidence.holders == ("site-0", "site-2", "site-3")
        assert any("from the difference" in line for line in evidence.lines())
        assert server.current() is None
        # What is left is, to the bit, the sum of the others' cohort.
        np.testing.assert_array_equal(server.pool.running().vector, statistics(late, server.terms))
        assert ("site-1" in server.ledger.names()) == (not forget)
        with pytest.raises(InputError, match=r"no client 'site-1'|site-1 is on no roster any more"):
            server.leave("site-1")
    named = [path for path in (tmp_path / "server").rglob("*") if path.is_file() and b"site-1" in path.read_bytes()]
    assert bool(named) == (not forget)
    with Coordinator(tmp_path / "server") as server:  # the files that are needed are still there
        others = [early[0], *early[2:]]
        renewed = MaskedFederation(server, others)
        renewed.sum_up()
        publication = server.publish()
        assert publication.number == 3
        assert set(publication.members) == {site.name for site in [*others, *late]}
        np.testing.assert_array_equal(server.pool.running().vector, statistics([*others, *late], server.terms))
        second.server = second.cohort.coordinator = server
        assert len(renewed.refine()) == 3
    blobs = {path.name.split("-")[0] for path in (tmp_path / "server" / "blobs").iterdir()}
    assert blobs == {"landmarks.safetensors", "sum", "publication", "cohort"}


def test_the_command_leaves_a_roster_of_the_others(tmp_path, capsys):
    sites, folder = masked_sites(tmp_path, (70, 60, 60, 50)), tmp_path / "server"
    for site in sites:
        assert apfl("federate", "keys", folder / "keys", "--site", site.name, "--masked") == 0
    assert apfl("federate", "roster", folder) == 0
    made = read_roster(folder / "rosters" / "001.json")
    assert f"fingerprint {made.fingerprint}" in capsys.readouterr().out
    with Coordinator(folder, masked_terms(FIXED)) as server:
        MaskedFederation(server, sites).run()
    (folder / "keys" / "site-2.pub").unlink()  # or the command would tell a server that does not run
    assert apfl("federate", "leave", folder, "site-2") == 0
    told = capsys.readouterr().out
    renewed = read_roster(folder / "rosters" / "001.json")
    assert renewed.names == ("site-0", "site-1", "site-3")
    assert renewed.fingerprint in told
    assert "the others must sum up again" in told
    assert (folder / "rosters" / "001.left").exists()


def test_join_checks_the_roster_before_anything_leaves(tmp_path, capsys):
    site, *_ = masked_sites(tmp_path)
    rows, keys = tmp_path / "rows.npz", tmp_path / "server" / "keys"
    np.savez(rows, features=site.train.features.numpy(), labels=site.train.labels.numpy(), class_names=["x", "y", "z"])
    for name in ("a", "b", "c"):
        assert apfl("federate", "keys", keys, "--site", name, "--masked") == 0
    assert apfl("federate", "roster", tmp_path / "server") == 0
    roster = tmp_path / "server" / "rosters" / "001.json"
    terms = tmp_path / "terms.json"
    terms.write_text(masked_terms(FIXED, class_names=("x", "y", "z")).to_json())
    words = ["federate", "join", "--server", "127.0.0.1:1", "--data", rows, "--name", "a", "--folder", tmp_path / "a"]
    words += ["--terms", terms, "--show-what-leaves", "--roster", roster]
    capsys.readouterr()
    assert apfl(*words, "--identity", keys / "a.identity") == 0
    told = " ".join(capsys.readouterr().err.split())
    assert read_roster(roster).fingerprint in told
    assert "masked with a, b, c; 3 of 3 must answer" in told
    assert "the server learns the sum over all sites that take part, at least 3" in told
    assert apfl(*words, "--identity", keys / "b.identity") == 2
    assert "the roster has another key for 'a'" in " ".join(capsys.readouterr().err.split())
    assert apfl(*words) == 2
    assert "--roster and --identity belong together" in " ".join(capsys.readouterr().err.split())
    assert apfl("federate", "roster", tmp_path / "server") == 2
    assert "0 sites in" in capsys.readouterr().err


def test_a_class_that_one_site_is_left_with_is_withheld_from_the_new_sum(tmp_path):
    """Statistics that were made for the former roster are not sent again as they are."""
    sites = masked_sites(tmp_path, (70, 70, 60, 60))
    for site in sites[2:]:
        site.train = Shard(site.train.features, site.train.labels.clamp_max(1))
    with Coordinator(tmp_path / "server", masked_terms(FIXED)) as server:
        MaskedFederation(server, sites).sum_up()
        places = server.pool.landmarks.encoding(server.terms).layout.places["class_counts"]
        assert server.pool.running().vector[places][2] > 0
        server.leave("site-1")
        renewed = MaskedFederation(server, [sites[0], *sites[2:]])
        renewed.sum_up()
        found = renewed.cohort.counts
        assert (found.holders[2], found.admitted) == (1, (True, True, False))
        assert server.pool.running().vector[places].tolist() == [found.rows[0], found.rows[1], 0]
