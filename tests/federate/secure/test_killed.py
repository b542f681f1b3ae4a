"""A member's process is killed in every phase, after its state is written and before its answer is sent."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from apfl.federate.secure import PHASES
from tests.federate.secure.toys import Play, ask, plain_sum

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

VICTIM = "site-01"


def process(folder: Path, phase: str, *kill: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "tests.federate.secure.killed", str(folder), phase, *kill]
    return subprocess.run(command, cwd=Path(__file__).parents[3], capture_output=True, timeout=120, check=False)


def test_a_process_that_is_killed_in_every_phase_answers_as_if_it_had_not_been(tmp_path):
    play = Play(4)
    member = play.members[VICTIM]
    told = {
        "name": VICTIM, "identity": member.identity.hex(), "federation": member.federation,
        "roster": {name: key.hex() for name, key in play.roster.keys.items()},
        "vector": play.vectors[VICTIM].tolist(),
    }  # fmt: skip
    (tmp_path / "member.json").write_text(json.dumps(told))
    for phase in PHASES:
        (tmp_path / "question").write_bytes(play.questions[phase][VICTIM])
        killed = process(tmp_path, phase, "kill")
        assert (killed.returncode, killed.stdout) == (-signal.SIGKILL, b"")
        first, again = process(tmp_path, phase), process(tmp_path, phase)
        assert first.returncode == 0, first.stderr
        assert first.stdout == again.stdout
        play.server.receive(VICTIM, first.stdout)
        for name in play.questions[phase].keys() - {VICTIM}:
            answer = ask(play.members[name], phase, play.questions[phase][name], play.vectors[name])
            play.server.receive(name, answer)
        following = play.server.close()
        if phase != PHASES[-1]:
            play.questions[PHASES[PHASES.index(phase) + 1]] = following
    assert play.server.total.tolist() == plain_sum(play.vectors, 16)
