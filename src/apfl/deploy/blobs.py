"""Large things in files of one folder: written aside, flushed to the disk, then put in place."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from apfl.container import replacing
from apfl.errors import InputError

__all__ = ["Blobs"]


class Blobs:
    """Files that a ledger refers to by name; those it does not refer to are left from a crash and swept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"cannot make the folder {folder}: {error.strerror or error}") from error

    def put(self, name: str, data: bytes | Mapping[str, Tensor]) -> None:
        """Write a file; when this returns it survives a power cut."""
        with replacing(self.folder / name) as temporary:
            if isinstance(data, bytes):
                temporary.write_bytes(data)
            else:
                save_file(dict(data), temporary)
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
        self._flush()

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise InputError(f"{self.folder / name} cannot be read ({error.strerror}); restore the folder") from error

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file."""
        try:
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise InputError(f"{self.folder / name} cannot be read ({error}); restore the folder") from error

    def remove(self, names: Collection[str]) -> None:
        """Delete files; those already gone are fine."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        if names:
            self._flush()

    def sweep(self, keep: Collection[str]) -> list[str]:
        """Delete every file that is not named in ``keep``."""
        stray = [path.name for path in self.folder.iterdir() if path.name not in keep]
        self.remove(stray)
        return stray

    def _flush(self) -> None:
        """Make renames and deletions durable."""
        with suppress(OSError):  # some systems cannot open a folder
            handle = os.open(self.folder, os.O_RDONLY)
            try:
                os.fsync(handle)
            finally:
                os.close(handle)
