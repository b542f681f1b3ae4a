"""Files that are never seen half-written, that survive a power cut, and that one process holds at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from safetensors import SafetensorError

from apfl.errors import InputError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

__all__ = ["flush", "hold", "in_use", "is_held", "replacing"]


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


def hold(path: Path, *, what: Path | None = None, wait: float = 0.0, private: bool = False) -> IO[bytes]:
    """The open file ``path``, which this process alone holds until it closes the file or ends, however it ends.

    ``what`` is what the lock is for (default: the file's folder), ``wait`` the seconds to wait for another process.
    Whoever can read the file can hold it; only its owner can read one that is ``private``.
    """
    mode = 0o600 if private else 0o666
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "a+b", opener=lambda name, flags: os.open(name, flags, mode))  # noqa: SIM115
    except OSError as error:
        reason = error.strerror or error
        raise InputError(f"cannot write {path.parent}: {reason}; choose a folder you may write to") from error
    until = time.monotonic() + wait
    while not _locked(file, shared=False):
        if time.monotonic() >= until:
            file.close()
            raise in_use(what or path.parent)
        time.sleep(0.05)
    return file


def is_held(path: Path) -> bool | None:
    """Whether a process holds the file ``path``; None on a system without such locks."""
    if fcntl is None:
        return None
    try:
        with path.open("rb") as file:
            return not _locked(file, shared=True)
    except OSError:  # nobody has made it
        return False


def in_use(what: Path) -> InputError:
    """The error that something is held by another process."""
    return InputError(f"{what} is in use by another process of apfl; wait until it ends, or choose another")


def _locked(file: IO[bytes], *, shared: bool) -> bool:
    """Whether the lock was to be had."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
