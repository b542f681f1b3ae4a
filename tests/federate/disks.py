"""Small, full and read-only disks for the tests."""

from __future__ import annotations

import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, megabytes: int) -> Iterator[None]:
    """``folder`` on a file system of its own."""
    folder.mkdir(parents=True)
    mount("-t", "tmpfs", "-o", f"size={megabytes}m", "tmpfs", folder)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


@contextmanager
def filled(folder: Path) -> Iterator[None]:
    """A disk on which somebody takes every byte that becomes free, until the block ends."""
    over, full, ballast = threading.Event(), threading.Event(), folder / "ballast"

    def fill() -> None:
        with ballast.open("ab", buffering=0) as file:
            while not over.wait(0.01):
                with suppress(OSError):
                    while file.write(bytes(4096)):
                        pass
                full.set()

    thread = threading.Thread(target=fill)
    thread.start()
    full.wait()
    try:
        yield
    finally:
        over.set()
        thread.join()
        ballast.unlink()


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """A folder that nobody can write to until the block ends, also not root."""
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,bind,ro", folder)
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def mount(*words: object) -> None:
    if os.geteuid() or not shutil.which("mount"):
        pytest.skip("needs root to mount a file system")
    done = subprocess.run(["mount", *map(str, words)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"cannot mount a file system here: {done.stderr.strip()}")
