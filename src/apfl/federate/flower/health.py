"""Whether the server or the site of this container is well: `python -m apfl.federate.flower.health`, code 0 or 1.

A server (the default) is well if its port answers, a site (``APFL_ROLE=site``) as long as its SuperNode runs.
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path

__all__ = ["listens", "runs"]

PORT = 9091
SUPERNODE = b"apfl.federate.flower.supernode"


def listens(port: int) -> bool:
    """Whether something on this machine accepts connections to a port."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 2):
        return True
    return False


def runs(words: bytes = SUPERNODE) -> bool:
    """Whether another process has these words in its command line."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if int(path.parent.name) != os.getpid() and words in path.read_bytes():
                return True
    return False


if __name__ == "__main__":
    well = runs() if os.environ.get("APFL_ROLE") == "site" else listens(int(os.environ.get("APFL_PORT", PORT)))
    sys.exit(0 if well else 1)
