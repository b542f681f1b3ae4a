"""Files that are never seen half-written, that survive a power cut, and that one process holds at a time."""

from __future__ import annotations

import errno
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO
from weakref import WeakSet

from safetensors import SafetensorError

from apfl.errors import InputError

try:
    import fcntl
except ImportError:  # Windows has no such locks
    fcntl = None  # type: ignore[assignment]

__all__ = ["cannot_write", "check_room", "flush", "hold", "in_use", "is_held", "make_private", "replacing"]

_held: WeakSet[IO[bytes]] = WeakSet()  # files that this process holds

ROOM = 1 << 20  # bytes that must be free for a process to go on: its logs and its database grow as well


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
        raise cannot_write(path, error) from error
    finally:
        with suppress(OSError):
            temporary.unlink()


def cannot_write(path: Path, error: Exception) -> InputError:
    """The error that a file cannot be written, with what to do about it.

    >>> print(cannot_write(Path("/srv/f"), OSError(28, "No space left on device")))
    cannot write /srv/f: No space left on device; free some space on this disk, then start again
    """
    reason = getattr(error, "strerror", None) or str(error)
    full = getattr(error, "errno", None) in (errno.ENOSPC, errno.EDQUOT) or "os error 28" in reason
    advice = "free some space on this disk, then start again" if full else "choose a folder you may write to"
    if getattr(error, "errno", None) == errno.EROFS:
        advice = "mount this disk for writing, then start again"
    return InputError(f"cannot write {path}: {reason}; {advice}")


def check_room(folder: Path, n_bytes: int = 0) -> None:
    """Refuse to go on in a folder whose disk is read-only, full, or too small for ``n_bytes`` more."""
    try:
        free, needed = shutil.disk_usage(folder).free, ROOM + n_bytes
        if free < needed:
            raise OSError(errno.ENOSPC, f"{free / 2**20:.1f} MiB are free and {needed / 2**20:.1f} MiB are needed")
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise cannot_write(folder, error) from error


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


def make_private(path: Path) -> None:
    """Let nobody but its owner read a file, or a folder and all that is in it; leave what belongs to others."""
    inside = path.rglob("*") if path.is_dir() and not path.is_symlink() else ()
    for each in (path, *inside):
        with suppress(OSError):
            if not each.is_symlink():
                each.chmod(0o700 if each.is_dir() else each.stat().st_mode & 0o700)  # what runs still runs


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
        raise cannot_write(path.parent, error) from error
    until = time.monotonic() + wait
    while not _locked(file, shared=False):
        if time.monotonic() >= until:
            file.close()
            raise in_use(what or path.parent)
        time.sleep(0.05)
    _held.add(file)
    return file


def _let_go() -> None:
    """In a forked child: a lock ends with the process that took it, not with the last of its children."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for file in _held:
        if not file.closed:
            os.dup2(nothing, file.fileno(), inheritable=False)  # closing it would free its number for another file
    os.close(nothing)


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_let_go)


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
