"""End with the process that started us, also when that one is killed and cannot say so."""

from __future__ import annotations

import os
import signal
import threading
import time

__all__ = ["PARENT", "end_with_parent"]

PATIENCE = 10.0  # seconds to end in an orderly manner
PARENT = "APFL_PARENT"  # who started this process; unset for one that stands alone


def end_with_parent() -> None:
    """Watch the parent named in the environment; without one, do nothing."""
    parent = os.environ.pop(PARENT, "")
    if parent.isdigit():
        threading.Thread(target=_watch, args=(int(parent),), daemon=True).start()


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(PATIENCE)
    os.kill(os.getpid(), signal.SIGKILL)
