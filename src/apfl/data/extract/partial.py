"""Rows that were computed so far, on disk: a killed extraction goes on from here.

``rows.f32`` grows; ``state.json`` says how much of it counts and is replaced, never edited. The rows reach the disk
before the state that counts them, so at any moment the state is true of the file, whatever else is at its end.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import zipfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

import numpy as np

from apfl.errors import InputError
from apfl.files import hold, replacing

__all__ = ["Partial"]

CHUNK = 1 << 22


class Partial:
    """The features of the first ``rows`` rows, less those ``skipped``, on the way to the file ``target``.

    ``plan`` is everything that decides their values, bit for bit; what another plan computed is thrown away.
    """

    def __init__(self, target: Path, plan: Mapping[str, Any], *, seconds_between_saves: float = 1.0) -> None:
        self.target, self.plan, self.pause = target, json.loads(json.dumps(plan)), seconds_between_saves
        self.folder = target.with_name(f".{target.name}.partial")
        self.rows, self.width, self.skipped, self.n_cut = 0, 0, dict[int, str](), 0
        self._file: IO[bytes] | None = None
        self._saved = time.monotonic()

    def __enter__(self) -> Partial:
        self._file = hold(self.folder / "rows.f32", what=self.target)  # one extraction at a time
        try:
            self._resume()
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._file is not None
        with suppress(OSError, InputError):  # a full disk: what was saved before still counts
            if error is not None and self.rows:
                self.save()
        self._file.close()
        if not self.rows:
            shutil.rmtree(self.folder, ignore_errors=True)

    def add(self, features: np.ndarray, rows: int, skipped: Mapping[int, str], n_cut: int = 0) -> None:
        """Append the features (m, l) of the next ``rows`` rows, of which those in ``skipped`` have none.

        ``n_cut`` of them were longer than what went through the network.
        """
        assert self._file is not None
        if len(features):
            self.width = features.shape[1]
        try:
            self._file.write(np.ascontiguousarray(features, np.float32).data)
        except OSError as error:
            raise InputError(
                f"cannot write {self.folder}: {error.strerror}; what is there will be used again"
            ) from error
        # In one statement: a signal between two would leave a state that is not true of the file.
        self.rows, self.skipped, self.n_cut = self.rows + rows, {**self.skipped, **skipped}, self.n_cut + n_cut
        if time.monotonic() - self._saved >= self.pause:
            self.save()

    def save(self) -> None:
        """Make what was added so far count."""
        assert self._file is not None
        self._file.flush()
        os.fsync(self._file.fileno())
        state = {"plan": self.plan, "rows": self.rows, "width": self.width, "skipped": list(self.skipped.items())}
        state |= {"n_cut": self.n_cut}
        with replacing(self.folder / "state.json") as temporary:
            temporary.write_text(json.dumps(state))
        self._saved = time.monotonic()

    def finish(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Write ``target``, an ``.npz`` of the features and ``arrays``, and remove the partial folder.

        Equal input gives equal bytes: no time and no order of a dictionary goes into the file.
        """
        assert self._file is not None
        self._file.flush()
        kept = self.rows - len(self.skipped)
        with replacing(self.target) as temporary, zipfile.ZipFile(temporary, "w") as archive:
            with archive.open("features.npy", "w", force_zip64=True) as member:
                header = {"descr": "<f4", "fortran_order": False, "shape": (kept, self.width)}
                np.lib.format.write_array_header_1_0(member, header)
                self._file.seek(0)
                shutil.copyfileobj(self._file, member, CHUNK)
            for name, array in sorted(arrays.items()):
                with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                    np.lib.format.write_array(member, array, allow_pickle=False)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _resume(self) -> None:
        assert self._file is not None
        try:
            state = json.loads((self.folder / "state.json").read_text())
            if state["plan"] == self.plan:
                skipped, n_cut = {int(row): why for row, why in state["skipped"]}, state.get("n_cut", 0)
                self.rows, self.width, self.skipped, self.n_cut = state["rows"], state["width"], skipped, n_cut
        except (OSError, ValueError, KeyError, TypeError):
            pass  # nothing was saved yet: begin at the beginning
        length = (self.rows - len(self.skipped)) * self.width * 4
        if self._file.seek(0, os.SEEK_END) < length:
            self.rows, self.width, self.skipped, self.n_cut, length = 0, 0, {}, 0, 0
        self._file.truncate(length)
