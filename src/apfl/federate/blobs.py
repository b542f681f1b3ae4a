"""Large things in files of one folder: written aside, flushed to the disk, then put in place."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from apfl.errors import InputError
from apfl.federate.wire import sha256
from apfl.files import cannot_write, flush, replacing

if TYPE_CHECKING:  # a look at the ledger needs no torch, which takes seconds
    from torch import Tensor

__all__ = ["Blobs", "FolderError"]


class FolderError(InputError):
    """The coordinator's own folder cannot be used: nobody's message is to blame."""


class Blobs:
    """Files that a ledger refers to by name; those it does not refer to are left from a crash and swept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise FolderError(str(cannot_write(folder, error))) from error

    def put(self, name: str, data: bytes | Mapping[str, Tensor]) -> str:
        """Write a file and return its SHA-256; when this returns the file survives a power cut."""
        try:
            with replacing(self.folder / name) as temporary:
                if isinstance(data, bytes):
                    temporary.write_bytes(data)
                else:
                    from safetensors.torch import save_file

                    save_file(dict(data), temporary)
                temporary.chmod(0o600)
                digest = _file_sha256(temporary)
        except InputError as error:
            raise FolderError(str(error)) from error
        flush(self.folder)
        return digest

    def read(self, name: str, digest: str) -> bytes:
        """The bytes of a file, which must have this SHA-256."""
        try:
            data = (self.folder / name).read_bytes()
        except OSError as error:
            raise FolderError(f"{self.folder / name} cannot be read ({error.strerror}); restore the folder") from error
        if sha256(data) != digest:
            raise self._changed(name)
        return data

    def tensors(self, name: str, digest: str | None) -> dict[str, Tensor]:
        """The tensors of a file, which must have this SHA-256; None for one that an earlier version wrote."""
        from safetensors.torch import load_file

        try:
            if digest is not None and _file_sha256(self.folder / name) != digest:
                raise self._changed(name)
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{self.folder / name} cannot be read ({error}); restore the folder") from error

    def _changed(self, name: str) -> FolderError:
        return FolderError(f"{self.folder / name} has changed on disk; restore the folder from a backup")

    def remove(self, names: Collection[str]) -> None:
        """Delete files; those already gone are fine."""
        for name in names:
            (self.folder / name).unlink(missing_ok=True)
        if names:
            flush(self.folder)

    def sweep(self, keep: Collection[str]) -> list[str]:
        """Delete every file that is not named in ``keep``."""
        stray = [path.name for path in self.folder.iterdir() if path.name not in keep]
        self.remove(stray)
        return stray


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
