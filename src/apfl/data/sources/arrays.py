"""Images in a numpy file: ``images`` (n, h, w, 3) or (n, h, w), 8 bits, with ``labels``, as one .npz or two .npy."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import IO

import numpy as np

from apfl.data.samples import Samples, decode
from apfl.data.sources import Match, by_ending
from apfl.data.sources.features import array_names, file_sha256, labels_of, read_arrays
from apfl.errors import InputError

READS = "a file .npz of images"


def accepts(source: str) -> Match:
    """An .npz that holds an array ``images``; one that cannot be read is refused by ``features``."""
    if not by_ending(source, ".npz") or not zipfile.is_zipfile(source):
        return Match.NO
    return Match.CONTENT if "images" in array_names(Path(source)) else Match.NO


def load(source: str | Path, *, labels_optional: bool = False) -> Samples:
    """The images of an ``.npz``; its other arrays of n entries are columns."""
    path = Path(source)
    arrays = read_arrays(path, without=("images",))
    if "labels" not in arrays and not labels_optional:
        raise InputError(f"{path} has 'images' but no array 'labels' (it has: {', '.join(sorted(arrays))})")
    shape, dtype, fetch = _zipped_rows(path, "images.npy")
    return _samples(path, shape, dtype, fetch, arrays)


def from_mapped(path: str | Path, images: np.ndarray, arrays: dict[str, np.ndarray], *beside: Path) -> Samples:
    """The images of an ``.npy`` that is mapped, not read, with their labels ``found`` in the files ``beside`` it."""
    return _samples(Path(path), images.shape, images.dtype, lambda row: np.array(images[row]), dict(arrays), *beside)


def _samples(
    path: Path,
    shape: tuple[int, ...],
    dtype: np.dtype,
    fetch: Callable[[int], np.ndarray],
    arrays: dict[str, np.ndarray],
    *beside: Path,
) -> Samples:
    if dtype != np.uint8 or not (len(shape) == 3 or (len(shape) == 4 and shape[3] == 3)) or 0 in shape:
        raise InputError(
            f"{path}: images are {dtype} of shape {shape}; expected uint8 of shape (n, h, w, 3) or (n, h, w)"
        )
    labels, names = labels_of(path, arrays, shape[0])
    if len(labels) != shape[0]:
        raise InputError(f"{path} has {shape[0]} images but {len(labels)} labels; there must be one for each")
    return Samples(
        name=path.name,
        kind="images",
        revision=file_sha256(path, *beside),
        labels=labels,
        class_names=names,
        fetch=fetch,
        decode=decode,
        where=lambda row: f"{path}, row {row}",
        columns={name: column for name, column in arrays.items() if column.shape == labels.shape},
    )


def npy_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype]:
    """Shape, whether it is stored column by column, and type of the array that ``stream`` is at the beginning of."""
    version = np.lib.format.read_magic(stream)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, fortran, dtype = read(stream)
    return shape, fortran, dtype


def _zipped_rows(path: Path, member: str) -> tuple[tuple[int, ...], np.dtype, Callable[[int], np.ndarray]]:
    """Shape, type and a reader of an array's rows, which unpacks no more of the file than it is asked for."""
    try:
        stream = zipfile.ZipFile(path).open(member)  # noqa: SIM115 (open as long as `fetch` lives)
        shape, fortran, dtype = npy_header(stream)
    except (OSError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise InputError(f"{path} cannot be read as .npz ({error})") from error
    if fortran:
        raise InputError(f"{path}: 'images' is stored column by column; save it with numpy.ascontiguousarray")
    start, length = stream.tell(), int(np.prod(shape[1:])) * dtype.itemsize
    streams = {os.getpid(): stream}  # a forked process would move its parent's place in the file: each opens its own

    def fetch(row: int) -> np.ndarray:
        if os.getpid() not in streams:
            streams[os.getpid()] = zipfile.ZipFile(path).open(member)  # noqa: SIM115
        own = streams[os.getpid()]
        own.seek(start + row * length)
        return np.frombuffer(bytearray(own.read(length)), dtype).reshape(shape[1:])

    return shape, dtype, fetch
