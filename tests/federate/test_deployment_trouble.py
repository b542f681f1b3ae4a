"""Trouble at a site or at the server, with real processes: changed rows, processes that die, clocks that are wrong."""

from __future__ import annotations

import os
import signal

import pytest

from apfl.data.federation import Shard
from tests.federate.test_deployment import FIXED, assert_central
from tests.federate.world import World, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = pytest.mark.deployment


def said(w: World, role: str) -> str:
    return " ".join(w.log(role).split())


def test_a_site_says_that_its_rows_changed_and_another_rejoins_with_them(tmp_path):
    with world(tmp_path, ["a", "b"], keep_contributions=False, d_primary=128, d_refinement=32, **FIXED) as w:
        w.server()
        first = w.join("a")
        w.join("b")
        w.connected("a", "b")
        w.finish(w.run())
        assert_central(w, ["a", "b"])
        first.terminate()
        w.until(lambda: first.poll() is not None, "a to disconnect")
        contributed = dict(w.train)
        for name, former in contributed.items():
            w.train[name] = Shard(former.features[:-40], former.labels[:-40])
            w.write(name)
        w.join("a", "--rejoin", role="a-again")
        w.connected("a-again")
        w.finish(w.run())
        w.until(lambda: "rows have changed since they were contributed to server" in said(w, "b"), "b to notice")
        w.train["b"] = contributed["b"]  # it was not told to rejoin, so nothing left it
        assert_central(w, ["a", "b"])


def test_executors_that_die_are_started_again_and_none_stays_behind(tmp_path):
    with world(tmp_path, ["a", "b"], d_primary=128, d_refinement=32, **FIXED) as w:
        server = w.server()
        w.join("a")
        w.join("b")
        w.connected("a", "b")
        executors = {role: w.pids(role, "bin/flower-superexec") for role in ("server", "a")}
        assert all(len(pids) == 1 for pids in executors.values())
        for role in executors:
            w.signal(signal.SIGKILL, role, "bin/flower-superexec")
        w.finish(w.run())  # it had not begun, or waited for a until the deadline
        assert_central(w, ["a", "b"])
        for role, before in executors.items():
            assert "Flower's executor ended" in said(w, role)
            assert set(before).isdisjoint(w.pids(role, "bin/flower-superexec"))
        assert len(w.json("federate", "status", w.folder)["restarts"]) == 1
        w.signal(signal.SIGKILL, "server", "-m apfl.federate.flower.superlink")
        w.until(lambda: not w.pids("server"), "the server's processes to end with the SuperLink")
        assert server.wait() == 2
        w.signal(signal.SIGKILL, "a", "from apfl.cli import main")
        w.until(lambda: not w.pids("a"), "the processes of a to end with `join`")


# Shifts what Flower signs its requests with, and what `join` compares with the server, in every process of a site.
SHIFTED = """
import datetime, os, time

seconds, real = float(os.environ["APFL_TEST_SHIFT"]), time.time
time.time = lambda: real() + seconds

class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return super().now(tz) + datetime.timedelta(seconds=seconds)

datetime.datetime = Shifted
"""


def test_a_site_whose_clock_is_wrong_is_told_so(tmp_path):
    (tmp_path / "shift").mkdir()
    (tmp_path / "shift" / "sitecustomize.py").write_text(SHIFTED)
    path = os.pathsep.join([str(tmp_path / "shift"), os.environ.get("PYTHONPATH", "")])
    with world(tmp_path, ["a", "b"], d_primary=128, d_refinement=32, **FIXED) as w:
        w.server()
        for name, seconds, told in (("a", 9, " s ahead of the server's"), ("b", -361, "6 min behind the server's")):
            w.join(name, within=["env", f"PYTHONPATH={path}", f"APFL_TEST_SHIFT={seconds}"])
            w.until(lambda name=name, told=told: told in said(w, name), f"{name} to be told of its clock")
            assert "connected;" not in said(w, name)
