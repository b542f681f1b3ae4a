"""A federation that PFLlib generated: ``config.json``, ``train/K.npz`` and ``test/K.npz`` for client K.

PFLlib stores each client as a pickled dict of two arrays, ``x`` and ``y``. A pickle can run anything, so these are read
by an unpickler that knows numpy arrays and nothing else. Vectors are taken as features, images (n, 1 or 3, h, w), which
PFLlib scales to -1 to 1, as pixels for a backbone. The columns ``client`` and ``test`` say who has which row: use them
with ``partition = "given"``, ``client_column = "client"``, ``test_column = "test"``.

https://github.com/TsingZ0/PFLlib, dataset/utils/dataset_utils.py
"""

from __future__ import annotations

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from apfl.data.federation import Dataset
from apfl.data.samples import Samples, decode
from apfl.data.sources import Match
from apfl.data.sources.arrays import npy_header
from apfl.data.sources.features import checked_features, coded_labels, file_sha256
from apfl.errors import InputError

READS = "a folder of PFLlib"
# All that an array is made of; numpy 2 renamed numpy.core. Dicts, strings and numbers need no name.
ALLOWED = {
    ("numpy", "ndarray"),
    ("numpy", "dtype"),
    ("numpy._core.multiarray", "_reconstruct"),
    ("numpy._core.numeric", "_frombuffer"),
}


def accepts(source: str) -> Match:
    """A folder that looks like one that PFLlib wrote."""
    path = Path(source)
    looks_so = source and (path / "config.json").is_file() and (path / "train" / "0.npz").is_file()
    return Match.CONTENT if looks_so else Match.NO


def load(source: str | Path) -> Dataset | Samples:
    """Every client's rows, one client after the other, with the columns ``client`` and ``test``."""
    path = Path(source)
    n_clients, n_classes = _config(path)
    parts = [(k, side, *_client(path / side / f"{k}.npz")) for k in range(n_clients) for side in ("train", "test")]
    shapes = {x.shape[1:] for *_, x, _ in parts}
    if len(shapes) > 1:
        raise InputError(f"{path}: the clients' rows have different shapes: {', '.join(map(str, sorted(shapes)))}")
    x, y = (np.concatenate([part[i] for part in parts]) for i in (2, 3))
    sizes = [len(part[3]) for part in parts]
    columns = {
        "client": np.repeat([k for k, *_ in parts], sizes),
        "test": np.repeat([side == "test" for _, side, *_ in parts], sizes),
    }
    labels, names = coded_labels(path, y, np.arange(n_classes))
    sha256 = _folder_sha256(path, n_clients)
    if x.ndim == 2:
        return Dataset(path.name, checked_features(path, x), torch.from_numpy(labels), names, columns, sha256)
    pixels = _pixels(path, x)
    return Samples(
        name=path.name, kind="images", revision=sha256, labels=labels, class_names=names, fetch=lambda row: pixels[row],
        decode=decode, where=lambda row: f"{path}, client {columns['client'][row]}", columns=columns,
    )  # fmt: skip


def _config(path: Path) -> tuple[int, int]:
    try:
        config = json.loads((path / "config.json").read_text())
        n_clients, n_classes = int(config["num_clients"]), int(config["num_classes"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path / 'config.json'} is not PFLlib's: no num_clients and num_classes ({error})") from error
    if min(n_clients, n_classes) < 1:
        raise InputError(
            f"{path / 'config.json'} has {n_clients} clients and {n_classes} classes; 1 or more are needed"
        )
    return n_clients, n_classes


def _client(path: Path) -> tuple[np.ndarray, np.ndarray]:
    try:
        with zipfile.ZipFile(path) as archive, archive.open("data.npy") as stream:
            _, _, dtype = npy_header(stream)
            if dtype.kind != "O":
                raise InputError(f"{path}: 'data' is {dtype}; PFLlib writes a dict of x and y")
            arrays = _Arrays(stream).load().item()
        x, y = np.asarray(arrays["x"]), np.asarray(arrays["y"])
    except (OSError, KeyError, ValueError, AttributeError, EOFError, TypeError, pickle.UnpicklingError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path} cannot be read as a client that PFLlib wrote: {error}") from error
    except zipfile.BadZipFile as error:
        raise InputError(f"{path} cannot be read as .npz ({error}): truncated?") from error
    if y.ndim != 1 or y.dtype.kind not in "iu" or len(x) != len(y) or x.dtype.kind not in "fiu" or x.ndim not in (2, 4):
        raise InputError(
            f"{path}: x is {x.dtype} {x.shape} and y {y.dtype} {y.shape}; expected numbers (n, l) or (n, c, h, w), and "
            "whole numbers (n,)"
        )
    return x, y.astype(np.int64)


class _Arrays(pickle.Unpickler):
    """Makes arrays and plain values; anything else that a file asks for is refused before it is made."""

    def find_class(self, module: str, name: str) -> Any:
        module = module.replace("numpy.core", "numpy._core")
        if (module, name) not in ALLOWED:
            raise InputError(f"a client's file asks for {module}.{name}; only arrays are read, for safety")
        return super().find_class(module, name)


def _pixels(path: Path, x: np.ndarray) -> np.ndarray:
    """(n, c, h, w), -1 to 1, as (n, h, w, 3) or (n, h, w) of 8 bits."""
    if x.shape[1] not in (1, 3) or x.size == 0 or abs(x).max() > 1.001:
        raise InputError(
            f"{path}: images {x.shape} from {x.min():g} to {x.max():g}; expected 1 or 3 channels, scaled to -1 to 1"
        )
    pixels = np.rint(127.5 * (x + 1)).clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(pixels[..., 0] if x.shape[1] == 1 else pixels)


def _folder_sha256(path: Path, n_clients: int) -> str:
    clients = (path / side / f"{k}.npz" for k in range(n_clients) for side in ("train", "test"))
    return file_sha256(path / "config.json", *clients)
