"""Cells on disk and in parallel processes: nothing finished is repeated, nothing half done is seen.

OUT/plan.toml            the plan as run
OUT/cells/KEY.json       one record for each finished cell, written in one go
OUT/tuning/KEY.jsonl     the grid of one method on one federation, shared by its seeds
OUT/checkpoints/KEY      where a gradient method or a grid stands
OUT/failed/KEY.txt       why a cell failed
"""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from apfl.errors import InputError
from apfl.experiments.cells import Cell
from apfl.experiments.plan import Plan, to_toml
from apfl.experiments.worker import Job, Setting, work
from apfl.files import hold, in_use, is_held, replacing

__all__ = ["Event", "claim", "damaged", "execute", "inspect", "jobs_for"]

GRACE = 30  # seconds that a stopped process has to write its checkpoint


@dataclass(frozen=True)
class Event:
    """Something happened to a job: ``begun``, ``round``, ``done`` or ``failed``."""

    kind: str
    job: Job
    info: Any = None  # the number of the round, the result in words, or why it failed


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


def execute(jobs: Sequence[Job], setting: Setting, n_workers: int) -> Iterator[Event]:
    """Run the jobs, ``n_workers`` at a time; what happens is yielded. Leaving the generator stops what is running."""
    team = _Team(setting, min(n_workers, len(jobs)))
    waiting, lost = list(jobs), set[str]()
    try:
        while waiting or team.busy:
            for untuned in [job for job in waiting if job.needs in lost]:
                waiting.remove(untuned)
                yield Event("failed", untuned, f"its settings could not be tuned: see {untuned.needs}.txt")
            for job in _ready(waiting, team)[: team.n_idle]:
                waiting.remove(job)
                team.give(job)
                yield Event("begun", job)
            for event in team.listen():
                if event.kind == "failed":
                    lost.add(event.job.key)
                yield event
    finally:
        team.stop()


def _ready(waiting: Sequence[Job], team: _Team) -> list[Job]:
    """The jobs whose settings are tuned, or need not be."""
    in_tuning = {job.key for job in [*waiting, *team.busy] if job.tuning}
    return [job for job in waiting if job.needs not in in_tuning]


class _Team:
    """Some processes with a job each. One that dies takes its own job with it and is replaced; nobody else notices."""

    def __init__(self, setting: Setting, size: int) -> None:
        self.setting, self.context = setting, multiprocessing.get_context("spawn")
        self.members: dict[Connection, tuple[BaseProcess, Job | None]] = {}
        for _ in range(size):
            self._hire()

    @property
    def busy(self) -> list[Job]:
        return [job for _, job in self.members.values() if job is not None]

    @property
    def n_idle(self) -> int:
        return sum(job is None for _, job in self.members.values())

    def give(self, job: Job) -> None:
        connection = next(each for each, (_, own) in self.members.items() if own is None)
        self.members[connection] = self.members[connection][0], job
        with suppress(OSError):  # one that is dead is noticed when listening
            connection.send(job)

    def listen(self) -> list[Event]:
        events = []
        for connection in wait([each for each, (_, job) in self.members.items() if job is not None]):
            assert isinstance(connection, Connection)
            process, job = self.members[connection]
            assert job is not None
            try:
                kind, info = connection.recv()
            except (EOFError, OSError):
                process.join()
                del self.members[connection]
                self._hire()
                events.append(Event("failed", job, _how_it_ended(process.exitcode)))
                continue
            if kind in ("done", "failed"):
                self.members[connection] = process, None
            events.append(Event(kind, job, info))
        return events

    def stop(self) -> None:
        for connection, (process, job) in self.members.items():
            if job is None:
                with suppress(OSError):
                    connection.send(None)
            else:
                process.terminate()
        for process, _ in self.members.values():
            process.join(GRACE)
            if process.is_alive():
                process.kill()
                process.join()

    def _hire(self) -> None:
        ours, theirs = self.context.Pipe()
        process = self.context.Process(target=work, args=(theirs, self.setting), daemon=True)
        with _threads(self.setting.threads):
            process.start()
        theirs.close()
        self.members[ours] = process, None


@contextmanager
def _threads(n: int) -> Iterator[None]:
    """The environment of a process that is started now: BLAS libraries look there when they are loaded."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, str(n)))
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _how_it_ended(code: int | None) -> str:
    if code is not None and code < 0:
        return f"its process was ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")
    return f"its process ended with code {code}"
