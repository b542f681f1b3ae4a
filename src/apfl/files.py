"""Files that are never seen half-written, and that survive a power cut."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from apfl.errors import InputError

__all__ = ["flush", "replacing"]


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path beside ``path`` that takes its place at the end: a reader never sees half a file.

    Nor does one after a power cut: what is in it is on the disk before its name is.
    """
    if os.path.isdir(path):  # also "." and "/", which have no name for the temporary file to take
        raise InputError(f"cannot write {path}: it is a folder; give a file name")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield temporary
        flush(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise InputError(f"cannot write {path}: {reason}; choose a folder you may write to") from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def flush(path: Path) -> None:
    """Make what was written to a file, or the names in a folder, survive a power cut."""
    try:
        handle = os.open(path, os.O_RDONLY if os.name == "posix" else os.O_RDWR)  # Windows flushes what it may write
    except OSError:  # some systems cannot open a folder
        return
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
