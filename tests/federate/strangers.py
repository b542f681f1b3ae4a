"""Another user of this machine, for the tests: a child process that has given up every right of ours."""

from __future__ import annotations

import json
import os
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOBODY = 65534


def as_nobody(work: Callable[[], Any]) -> Any:
    """What some work returns if the user ``nobody`` does it; it is to return plain values."""
    if os.geteuid():
        pytest.skip("needs root to become another user")
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.write(writer, json.dumps(work()).encode())
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    assert said, "the child failed; see its traceback above"
    return json.loads(said)


def open_to_all(folder: Path, top: Path = Path("/tmp")) -> None:
    """Let everyone into the folders that lead to ``folder``, which pytest makes for us alone."""
    for parent in folder.parents:
        if parent in (top, *top.parents):
            return
        parent.chmod(0o755)


def readable(folder: Path) -> list[str]:
    """The files below a folder, and the folders, that this process can read."""
    found = []
    for place, folders, files in os.walk(folder):
        found += [str(Path(place) / name) for name in files if os.access(Path(place) / name, os.R_OK)]
        found += [str(Path(place) / name) for name in folders if os.access(Path(place) / name, os.R_OK)]
    return found
