"""Run a command that ends, with all it started, as soon as the process that wanted it is gone: also if that was killed.

Run by its path with the parent's number and the command; it needs nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress

LOOK = 0.2  # seconds between two looks at the parent
PATIENCE = 3.0  # seconds that the command has to end by itself
PR_SET_PDEATHSIG = 1


def main() -> int:
    """Start the command and wait for its end, for the parent's, or for SIGTERM."""
    parent, command = int(sys.argv[1]), sys.argv[2:]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    process = subprocess.Popen(command, start_new_session=True, preexec_fn=_end_with_guard)
    try:
        while process.poll() is None and os.getppid() == parent:
            time.sleep(LOOK)
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        end(process, PATIENCE)
    return process.returncode if process.returncode >= 0 else 128 - process.returncode


def end(process: subprocess.Popen[bytes], patience: float) -> None:
    """Ask a process to end, then make all it started end too: they are one process group."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(patience)
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _end_with_guard() -> None:
    """If this guard itself is killed, the kernel ends the command; only Linux can do this."""
    with suppress(AttributeError, OSError):
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
