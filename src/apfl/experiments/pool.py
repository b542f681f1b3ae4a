"""Cells on disk, worked on wherever an executor has room: nothing finished is repeated, nothing half done is seen.

OUT/plan.toml            the plan as run
OUT/cells/KEY.json       one record for each finished cell, written in one go
OUT/tuning/KEY.jsonl     the grid of one method on one federation, shared by its seeds
OUT/checkpoints/KEY      where a gradient method or a grid stands
OUT/failed/KEY.txt       why a cell failed
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from apfl.data.executors import Event, Executor
from apfl.errors import InputError
from apfl.experiments.cells import Cell
from apfl.experiments.plan import Plan, to_toml
from apfl.experiments.worker import Bench, Job, Setting
from apfl.files import hold, in_use, is_held, replacing

__all__ = ["claim", "damaged", "execute", "inspect", "jobs_for"]


@contextmanager
def claim(folder: Path, plan: Plan, keys: Sequence[str]) -> Iterator[None]:
    """Take the folder for this plan: refuse one that another process is in, or that holds cells of another plan."""
    with hold(folder / ".lock"):
        _refuse_others(folder, keys)
        # Written in vain by processes that were killed over it: temporary files (ours, those of safetensors), and more.
        in_vain = [*folder.glob("*/.*.tmp"), *folder.glob("*/.tmp*"), *damaged(folder, keys)]
        for left_over in in_vain:
            left_over.unlink(missing_ok=True)
        with replacing(folder / "plan.toml") as temporary:
            temporary.write_text(to_toml(plan))
        yield


def inspect(folder: Path, keys: Sequence[str]) -> None:
    """Refuse what `claim` would, and write nothing."""
    nearest = next(path for path in (folder, *folder.absolute().parents) if os.access(path, os.F_OK))
    if not (nearest.is_dir() and os.access(nearest, os.W_OK)):
        raise InputError(f"cannot write {folder}: {nearest} is no folder that you may write in; choose another --out")
    if is_held(folder / ".lock"):
        raise in_use(folder)
    _refuse_others(folder, keys)


def _refuse_others(folder: Path, keys: Sequence[str]) -> None:
    others = sorted({path.stem for path in folder.glob("cells/*.json")} - set(keys))
    if others:
        raise InputError(
            f"{folder} holds {len(others)} finished cell{'s' * (len(others) > 1)} not asked for now ({others[0]}"
            f"{' is one' * (len(others) > 1)}): of another plan, other data, other options, or a file of your own "
            "that has changed; choose another --out"
        )


def damaged(folder: Path, keys: Sequence[str]) -> list[Path]:
    """The results of these cells, and of any tuning, that were cut short: by a power cut, or a disk that was full."""
    files = [*(folder / "cells" / f"{key}.json" for key in keys), *sorted(folder.glob("tuning/*.jsonl"))]
    return [path for path in files if path.exists() and _cut_short(path)]


def _cut_short(path: Path) -> bool:
    """Whether a file is empty or breaks off. One that is whole but of another version is not for us to replace."""
    try:
        text = path.read_text()
        for line in [text] if path.suffix == ".json" else text.splitlines() or [""]:
            json.loads(line)
    except OSError:
        return False
    except ValueError:  # of JSON, or of the encoding
        return True
    return False


def _is_done(path: Path) -> bool:
    return path.exists() and not _cut_short(path)


def jobs_for(cells: Mapping[str, Cell], folder: Path, data: str | None, device: str) -> list[Job]:
    """What is left to do, in order: the tuning of a method comes before the cells that wait for it."""
    jobs: dict[str, Job] = {}
    for key, cell in cells.items():
        if _is_done(folder / "cells" / f"{key}.json"):
            continue
        tuning = cell.tuning_key(data, device) if cell.tune else None
        if tuning is not None and not _is_done(folder / "tuning" / f"{tuning}.jsonl"):
            jobs.setdefault(tuning, Job(tuning, cell, tuning=True))
        jobs[key] = Job(key, cell, needs=tuning)
    return list(jobs.values())


def execute(jobs: Sequence[Job], setting: Setting, executor: Executor) -> Iterator[Event[Job]]:
    """Run the jobs; what happens is yielded. Leaving the generator stops what is running."""
    tunings = {job.key: job for job in jobs if job.tuning}
    for event in executor.map(Bench(setting), jobs, needs=lambda job: tunings.get(job.needs or "")):
        if event.kind == "left":
            why = f"its settings could not be tuned: see {event.item.needs}.txt"
            yield Event("failed", event.item, why)
        else:
            yield event
