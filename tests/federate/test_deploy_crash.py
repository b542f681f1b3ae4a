"""A coordinator that is killed goes on from its folder, and one with many clients needs no more memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def killed(*arguments: str) -> dict[str, Any]:
    """The report of `tests.federate.killed`, which kills real processes."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.federate.killed", *arguments],
        capture_output=True, text=True, env=environment, cwd=ROOT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def check(report: dict[str, Any], keep: str) -> None:
    """Every time the same model as without a kill, from the same three clients, each asked once, nothing left over."""
    assert report["wrong"] == []
    assert len(report["members"]) == 3
    assert report["contributions"] == (3 if keep == "keep" else 0)


@pytest.mark.parametrize("keep", ["keep", "sum"])
def test_killed_at_some_steps(keep):
    report = killed("steps", keep, "59")
    check(report, keep)
    assert report["killed"] == report["moments"] >= 4


@pytest.mark.parametrize("keep", ["keep", "sum"])
def test_a_landmark_federation_killed_at_some_steps(keep):
    report = killed("steps", keep, "79", "landmarks")
    check(report, keep)
    assert report["killed"] == report["moments"] >= 4


def test_a_pilot_killed_at_some_steps():
    report = killed("steps", "keep", "197", "pilot")  # no multiple of 3: not the same place of every transaction
    check(report, "keep")
    assert report["killed"] == report["moments"] >= 3


@pytest.mark.slow
def test_a_pilot_killed_at_every_third_step():
    report = killed("steps", "keep", "3", "pilot")
    check(report, "keep")
    assert report["killed"] == report["moments"] >= 100


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "sum"])
def test_a_landmark_federation_killed_at_every_fifth_step(keep):
    report = killed("steps", keep, "5", "landmarks")
    check(report, keep)
    assert report["killed"] == report["moments"] >= 60


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "sum"])
def test_killed_at_every_step(keep):
    report = killed("steps", keep, "1")
    check(report, keep)
    assert report["killed"] == report["moments"] >= 200


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "sum"])
def test_killed_at_random_moments(keep):
    report = killed("random", keep, "2")
    check(report, keep)
    assert report["killed"] >= 20  # some finish first


def test_memory_does_not_grow_with_the_clients():
    few, many = (killed("memory", n, "256", "sum")["peak_mb"] for n in ("5", "60"))
    # 55 contributions of width 256 would be 29 MB as sums; the allocator's own noise is a few.
    assert many < few + 8


@pytest.mark.slow
@pytest.mark.parametrize("keep", ["keep", "sum"])
def test_memory_is_flat_to_a_thousand_clients(keep):
    few, many = (killed("memory", n, "1024", keep)["peak_mb"] for n in ("10", "1000"))
    print(f"peak memory with 10 clients {few:.0f} MB, with 1,000 clients {many:.0f} MB ({keep})")
    # A thousand contributions would be 8 GB as matrices. The allocator's noise was 25 MB, on a crowded machine 65.
    assert many < few + 80
