"""Files that one process holds at a time: the same rule and the same words wherever there is such a file."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from apfl.data.extract.partial import Partial
from apfl.errors import InputError
from apfl.experiments.pool import claim, inspect
from apfl.federate.ledger import Ledger
from apfl.files import hold, is_held

HOLD = """
import sys, time, pathlib
from apfl.files import hold
file = hold(pathlib.Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize(
    ("lock", "take"),
    [
        ("lock", Ledger),
        (".lock", lambda folder: claim(folder, None, []).__enter__()),
        (".lock", lambda folder: inspect(folder, [])),
        (".f.npz.partial/rows.f32", lambda folder: Partial(folder / "f.npz", {}).__enter__()),
    ],
)
def test_what_another_process_holds_is_refused_in_the_same_words(lock, take, tmp_path):
    assert is_held(tmp_path / lock) is False
    with hold(tmp_path / lock):
        assert is_held(tmp_path / lock)
        with pytest.raises(InputError, match=r"is in use by another process of apfl; wait until it ends, or choose"):
            take(tmp_path)
    assert is_held(tmp_path / lock) is False


def test_a_lock_goes_with_its_process(tmp_path: Path):
    with subprocess.Popen([sys.executable, "-c", HOLD, tmp_path / "lock"], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline()
        with pytest.raises(InputError, match="in use"):
            hold(tmp_path / "lock")
        process.kill()
    hold(tmp_path / "lock", wait=30).close()


def test_others_cannot_read_a_private_lock(tmp_path: Path):
    """Whoever can read a file can lock it, and so keep a server out of its own folder."""
    hold(tmp_path / "lock", private=True).close()
    assert stat.S_IMODE((tmp_path / "lock").stat().st_mode) == 0o600


def test_a_folder_that_cannot_be_is_named(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(InputError, match=r"cannot write .*file/folder: Not a directory; choose a folder"):
        hold(tmp_path / "file" / "folder" / "lock")


FORKS = """
import os, pathlib, sys, time
from apfl.files import hold
file = hold(pathlib.Path(sys.argv[1]))
file.write(b"not on the disk yet")
if os.fork() == 0:
    print("begun", flush=True)
    time.sleep(60)
    os._exit(0)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_lock_ends_with_the_process_that_took_it_and_not_with_its_children(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", FORKS, tmp_path / "lock"],
        stdout=subprocess.PIPE, start_new_session=True,
    ) as parent:  # fmt: skip
        try:
            assert parent.stdout.readline() == b"begun\n"
            assert is_held(tmp_path / "lock")  # the child has let go, its parent has not
            os.kill(parent.pid, signal.SIGKILL)
            hold(tmp_path / "lock", wait=10).close()
            assert (tmp_path / "lock").read_bytes() == b""  # and the child wrote nothing of its parent's
        finally:
            os.killpg(parent.pid, signal.SIGKILL)
