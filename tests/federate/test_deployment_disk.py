"""Disks that are full, for real: a small file system is mounted and filled while a federation runs."""

from __future__ import annotations

import pytest

from tests.federate.disks import filled, small_disk
from tests.federate.test_deployment import FIXED, assert_central, model_of
from tests.federate.world import world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = pytest.mark.deployment


def test_a_full_disk_at_the_server_ends_the_run_in_a_sentence_and_costs_no_answer(tmp_path):
    """Sites used to fall silent for good: Flower's signs of life stop at the first HTTP 500."""
    with small_disk(tmp_path / "server", 40), world(tmp_path, ["a", "b"], d_primary=256, **FIXED) as w:
        w.server()
        for name in "ab":
            w.join(name)
        w.connected(*"ab")
        run = w.run("--deadline", 100)
        w.until(lambda: w.seen("asked", client="a", phase="statistics"), "a to be asked", 0.005)
        with filled(w.folder):
            w.finish(run, code=2)
            assert "No space left" in w.log("run") or "MiB are free" in w.log("run")
            assert "free some space on this disk" in w.log("run").splitlines()[-1]
            assert "HTTP" not in w.log("run").splitlines()[-1]
            w.finish(w.run(), code=2)  # it does not begin either
            assert "MiB are free" in w.log("run").splitlines()[-1]
            # Longer than Flower's signs of life are apart (30 s), so that every site meets the full disk.
            w.until(lambda: all("retrying" in supernode_log(w, name) for name in "ab"), "the sites to notice")
        w.finish(w.run("--deadline", 100))
        assert_central(w, ["a", "b"])


def supernode_log(w, name: str) -> str:
    return (w.root / name / "site" / "supernode.log").read_text()


def test_a_full_disk_at_a_site_costs_that_site_a_run(tmp_path):
    """Flower kept an app that it could not copy completely, and never installed it again."""
    disk = tmp_path / "a" / "site"
    with small_disk(disk, 30), world(tmp_path, ["a", "b"], d_primary=256, quorum=1, **FIXED) as w:
        w.server()
        for name in "ab":
            w.join(name)
        w.connected(*"ab")
        with filled(disk):
            w.finish(w.run("--deadline", 20))
        assert_central(w, ["b"])
        assert any("o space left" in event["reason"] or "load" in event["reason"] for event in w.seen("failed"))
        w.finish(w.run("--deadline", 60))
        weights = assert_central(w, ["a", "b"])
        assert model_of(w, "a").primary.equal(weights)
