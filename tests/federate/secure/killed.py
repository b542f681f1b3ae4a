"""A member in a process of its own: one question from a file, its state in a file, killed before the answer is out.

python -m tests.federate.secure.killed FOLDER PHASE [kill]
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import numpy as np

from apfl.federate.secure import Member, Roster
from apfl.files import replacing


def main(folder: Path, phase: str, kill: bool) -> None:
    told = json.loads((folder / "member.json").read_text())
    roster = Roster({name: bytes.fromhex(key) for name, key in told["roster"].items()})
    state = folder / "state"

    def keep(data: bytes) -> None:
        with replacing(state) as temporary:
            temporary.write_bytes(data)
        if kill:
            os.kill(os.getpid(), signal.SIGKILL)

    member = Member(
        told["name"], bytes.fromhex(told["identity"]), roster, federation=told["federation"], keep=keep,
        state=state.read_bytes() if state.exists() else None,
    )  # fmt: skip
    question = (folder / "question").read_bytes()
    vector = np.array(told["vector"])
    answer = member.mask(question, vector) if phase == "mask" else getattr(member, phase)(question)
    sys.stdout.buffer.write(answer)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:] == ["kill"])
