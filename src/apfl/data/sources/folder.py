"""A folder of images: ``root/class/*``, or ``root/domain/class/*``, in any format Pillow reads."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from apfl.data.samples import Samples, decode
from apfl.data.sources import Match
from apfl.data.sources.features import unlabelled
from apfl.errors import InputError, optional

LAYOUT = "expected root/class/image files, or root/domain/class/image files"


READS = "a folder of images"


def accepts(source: str) -> Match:
    """Any folder, if no other source finds its own files in it."""
    return Match.GUESS if source and Path(source).is_dir() else Match.NO  # an empty name would be the folder one is in


def load(source: str | Path, *, labels_optional: bool = False) -> Samples:
    """The images in the order of their paths; folders name the classes and, a level above, the column ``domain``."""
    root = Path(source)
    files = _images(root)
    if not files:
        raise InputError(f"{root} holds no images that Pillow can read; {LAYOUT}")
    parts = [file.relative_to(root).parts for file in files]
    depths = {len(each) for each in parts}
    by_class = depths in ({2}, {3})
    if not by_class and not labels_optional:
        raise _no_classes(root, parts)
    labels, class_names = unlabelled(len(parts)) if not by_class else _classes([each[-2] for each in parts])
    columns = {"path": np.array(["/".join(each) for each in parts])}
    if depths == {3}:
        columns["domain"] = np.array([each[0] for each in parts])
    return Samples(
        name=root.resolve().name,
        kind="images",
        revision=_revision(root, files),
        labels=labels,
        class_names=class_names,
        fetch=lambda row: files[row],
        decode=decode,
        where=lambda row: str(files[row]),
        columns=columns,
    )


def _classes(folders: list[str]) -> tuple[np.ndarray, tuple[str, ...]]:
    names, labels = np.unique(folders, return_inverse=True)
    return labels.astype(np.int64), tuple(names.tolist())


def _no_classes(root: Path, parts: list[tuple[str, ...]]) -> InputError:
    shown = {len(each): "/".join(each) for each in parts}
    if set(shown) == {1}:
        return InputError(f"{root} holds images without a folder for each class ({shown[1]}); {LAYOUT}")
    return InputError(f"{root} holds images at different depths ({', '.join(shown.values())}); {LAYOUT}")


def _images(root: Path) -> list[Path]:
    known = set(optional("PIL.Image", "hub").registered_extensions())
    # Levels are walked one by one, not to any depth: a link that points upwards cannot make a loop.
    level, files = [root], []
    try:
        for _ in range(3):
            entries = sorted(e for folder in level for e in folder.iterdir() if not e.name.startswith("."))
            files += [e for e in entries if e.is_file() and e.suffix.lower() in known]
            level = [e for e in entries if e.is_dir()]
    except OSError as error:
        raise InputError(f"cannot look into {error.filename}: {error.strerror}; give a folder of images") from error
    return sorted(files)


def _revision(root: Path, files: list[Path]) -> str:
    """Path, size and time of every file: reading them all would take as long as a small extraction."""
    digest = hashlib.sha256()
    for file in files:
        state = file.stat()
        digest.update(f"{file.relative_to(root).as_posix()}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()
