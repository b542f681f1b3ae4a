"""What `apfl bench` does with a cell, in whatever process: run it, and put its record on the disk."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from apfl.data.executors import Tell
from apfl.data.federation import Dataset, Federation
from apfl.data.protocol import apart, federate
from apfl.errors import InputError
from apfl.experiments.cells import Cell
from apfl.experiments.headline import HEADLINES
from apfl.experiments.oracle import best_on_test
from apfl.experiments.record import Record, hashes, user_files
from apfl.experiments.run import run
from apfl.experiments.tuning import HELD_OUT, ROUNDS, Tuned, tune_once
from apfl.files import replacing
from apfl.methods import method_class

__all__ = ["Bench", "Job", "Setting"]


@dataclass(frozen=True)
class Job:
    """A cell to run, or its settings to tune; ``needs`` is the key of the tuning it waits for."""

    key: str
    cell: Cell
    tuning: bool = False
    needs: str | None = None


@dataclass(frozen=True)
class Setting:
    """What all jobs of a plan have in common."""

    folder: Path
    load: Callable[[], Dataset]
    source: Mapping[str, Any]
    device: str
    threads: int
    checkpoint_seconds: float
    n_workers: int = 1
    data_sha256: str | None = None  # of the data that the plan was checked with
    paths: Sequence[str] = ()  # methods of the user's own: they must be loaded before a job of theirs can be received


def _unpacked(setting: Setting) -> Bench:
    """In another process; from here on jobs of the user's own methods can be received."""
    for path in setting.paths:
        method_class(path)
    return Bench(setting)


class Bench:
    """What is done with a job: a `apfl.data.executors.Work`. Data and federation are kept from one job to the next."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.dataset: Dataset | None = None
        self.at_hand: tuple[Any, Federation] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpacked, (self.setting,)

    def __call__(self, job: Job, tell: Tell) -> str:
        """Run or tune; the result in words. It is on disk."""
        if not (self.setting.folder / "plan.toml").exists():
            raise InputError(f"{self.setting.folder} is not seen from {platform.node()}; give --out a shared folder")
        _check_files(job.cell)
        return (self.tune if job.tuning else self.run)(job, tell)

    def run(self, job: Job, tell: Tell) -> str:
        """Train, measure, write the record; the accuracy, RMSE or mAP in words."""
        cell, folder = job.cell, self.setting.folder
        dataset, federation = self._federation(cell, cell.seed)
        tuned = None if job.needs is None else self._tuned(job.needs, cell, tell)
        method: Any = cell.method if tuned is None else tuned.method
        if cell.oracle and dataset.target != "classification":
            raise InputError(
                f"oracle looks for accuracies, and {dataset.name} has no classes; leave it out of the plan"
            )
        if cell.oracle:
            method = best_on_test(method, federation, cell.seed)
        checkpoint = folder / "checkpoints" / f"{job.key}.safetensors"
        record, _ = run(
            cell.name, method, federation, dataset, cell.protocol, cell.seed,
            on_round=lambda reached: tell(reached.index), checkpoint=checkpoint,
            checkpoint_seconds=self.setting.checkpoint_seconds,
        )  # fmt: skip
        record = replace(
            record, method=cell.row, source=dict(self.setting.source),
            tuning={} if tuned is None else _account(cell, tuned),
        )  # fmt: skip
        _keep(record, folder / "cells" / f"{job.key}.json")
        checkpoint.unlink(missing_ok=True)
        return record.headline.said(record.score, 2)

    def tune(self, job: Job, tell: Tell) -> str:
        """Try the grid; the result stays in the folder. The best of it on held-out rows, in words."""
        tuned = self._tuned(job.key, job.cell, tell)
        headline = HEADLINES[self._data().target]
        best = headline.sign * max(headline.sign * float(each[headline.metric]) for each in tuned.results)
        return headline.said(best, 2)

    def _tuned(self, key: str, cell: Cell, tell: Tell) -> Tuned:
        path, clients, seed = self.setting.folder / "tuning" / f"{key}.jsonl", [], cell.tuning_seed
        if not path.exists():
            federation = self._federation(cell, seed)[1]
            clients = list(apart(federation, cell.protocol, seed)[0].train)
        dataset = self._data()
        n_classes, where = len(dataset.class_names), [dataset.sha256, cell.label]
        return tune_once(
            path, cell.name, cell.method, clients, n_classes, seed, where, cell.tune, tell,
            self.setting.folder / "checkpoints" / f"{key}.safetensors", self.setting.checkpoint_seconds,
        )  # fmt: skip

    def _data(self) -> Dataset:
        if self.dataset is None:
            setting = self.setting
            if setting.device.startswith("cuda") and setting.n_workers > 1:
                # At its limit a process gives back what it holds unused, which the others cannot make it do.
                torch.cuda.set_per_process_memory_fraction(0.9 / setting.n_workers, torch.device(setting.device).index)
            self.dataset = setting.load()
            if setting.data_sha256 not in (None, self.dataset.sha256):
                raise InputError(
                    f"{self.dataset.name} holds other rows on {platform.node()}; give all machines the same"
                )
        return self.dataset

    def _federation(self, cell: Cell, seed: int) -> tuple[Dataset, Federation]:
        dataset = self._data()
        if self.at_hand is None or self.at_hand[0] != (cell.protocol, seed):
            self.at_hand = None  # let go of one before the next is made
            self.at_hand = (cell.protocol, seed), federate(dataset, cell.protocol, seed).to(self.setting.device)
        return dataset, self.at_hand[1]


def _check_files(cell: Cell) -> None:
    """A file that was changed since the plan was checked would give its results the name of another text."""
    if hashes(user_files(cell.method, cell.protocol)) != hashes(cell.files):
        paths = " or ".join(file["path"] for file in cell.files.values())
        raise InputError(f"{paths} has changed while the plan ran; run the same command again, with another --out")


def _keep(record: Record, path: Path) -> None:
    with replacing(path) as temporary:
        temporary.write_text(record.to_json() + "\n")


def _account(cell: Cell, tuned: Tuned) -> dict[str, Any]:
    return {
        "seed": cell.tuning_seed, "held_out": HELD_OUT, "rounds": min(cell.method.n_rounds, ROUNDS),
        "axes": {name: list(values) for name, values in (cell.tune or {}).items()}, "results": list(tuned.results),
    }  # fmt: skip
