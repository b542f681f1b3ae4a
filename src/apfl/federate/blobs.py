"""Large things in files of one folder: written aside, flushed to the disk, then put in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from apfl.errors import InputError
from apfl.files import flush, replacing

__all__ = ["Blobs", "FolderError"]


class FolderError(InputError):
    """The coordinator's own folder cannot be used: nobody's message is to blame."""


class Blobs:
    """Files that a ledger refers to by name; those it does not refer to are left from a crash and swept."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise FolderError(f"cannot make the folder {folder}: {error.strerror or error}") from error

    def put(self, name: str, data: bytes | Mapping[str, Tensor]) -> None:
        """Write a file; when this returns it survives a power cut."""
        try:
            with replacing(self.folder / name) as temporary:
                if isinstance(data, bytes):
                    temporary.write_bytes(data)
                else:
                    save_file(dict(data), temporary)
        except InputError as error:
            raise FolderError(str(error)) from error
        flush(self.folder)

    def read(self, name: str) -> bytes:
        """The bytes of a file."""
        try:
            return (self.folder / name).read_bytes()
        except OSError as error:
            raise FolderError(f"{self.folder / name} cannot be read ({error.strerror}); restore the folder") from error

    def tensors(self, name: str) -> dict[str, Tensor]:
        """The tensors of a file."""
        try:
            return load_file(self.folder / name)
        except (OSError, SafetensorError) as error:
            raise FolderError(f"{self.folder / name} cannot be read ({error}); restore the folder") from error

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
