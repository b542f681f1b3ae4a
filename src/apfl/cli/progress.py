"""How far something has got, for someone who is watching."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from apfl.errors import printable

if TYPE_CHECKING:  # commands that have no data need no torch, which takes seconds
    from apfl.data.executors import Event
    from apfl.data.federation import Dataset
    from apfl.data.protocol import Protocol
    from apfl.experiments.record import Record
    from apfl.experiments.worker import Job

__all__ = ["Board", "Counter", "end_as_interrupted", "ended", "err", "line", "out", "spinner", "tell_hints"]

# Titles, names and paths are the user's own: "[red]" or ":smile:" in them is what they are called.
out, err = Console(markup=False, emoji=False), Console(stderr=True, markup=False, emoji=False)


def spinner() -> Progress:
    """For what cannot say how much of it is left."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    return Progress(*columns, console=err, transient=True, disable=not err.is_terminal)


def end_as_interrupted() -> Any:
    """SIGTERM, which service managers and schedulers send, ends as Ctrl-C does: children first. The former handler."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    return signal.signal(signal.SIGTERM, interrupt)


def line(words: str) -> None:
    """For whoever reads a log; on a terminal something moves, and that is enough."""
    if not err.is_terminal:
        err.print(words, soft_wrap=True, highlight=False)


def tell_hints(dataset: Dataset, protocol: Protocol) -> None:
    """Which columns of a table are features, and what to look at."""
    from apfl.data.hints import hints

    for each in hints(dataset, protocol):
        err.print(printable(each, 2000), soft_wrap=True, highlight=False)


def ended(n: int, total: int, record: Record) -> None:
    """A line in the log for a record that is on disk."""
    line(f"{n}/{total} {record.method}, seed {record.seed}: {record.headline.said(record.score, 2)}")


class Counter:
    """How many samples are through: a bar on a terminal; elsewhere a line a minute, and one at the end."""

    def __init__(self, what: str, total: int) -> None:
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        self.progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.what, self.task = what, self.progress.add_task(what, total=total, rate="")
        self.start: tuple[float, int] | None = None  # not counting what an earlier process did
        self.said = time.monotonic()

    def __enter__(self) -> Counter:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()

    def show(self, done: int, total: int) -> None:
        now = time.monotonic()
        self.start = self.start or (now, done)
        rate = f"{(done - self.start[1]) / max(now - self.start[0], 1e-9):.1f}/s"
        self.progress.update(self.task, completed=done, total=total, rate=rate)
        if done == total or now - self.said >= 60:
            self.said = now
            line(f"{self.what}: {done}/{total}, {rate}")


class Board:
    """The progress on a terminal, with a line for each cell that is running; elsewhere a line for each that ended."""

    def __init__(self, total: int) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self.progress = Progress(*columns, console=err, transient=True, disable=not err.is_terminal)
        self.total, self.ended = total, 0
        self.running: dict[str, TaskID] = {}

    def __enter__(self) -> Board:
        self.progress.start()
        self.all = self.progress.add_task("all", total=self.total)
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        self.progress.stop()

    def show(self, event: Event[Job]) -> None:
        job = event.item
        name = f"tuning {job.key}" if job.tuning else job.key
        if event.kind == "begun":
            rounds = 1 if job.tuning else job.cell.method.n_rounds
            self.running[job.key] = self.progress.add_task(name, total=rounds)
        elif event.kind == "reached":
            self.progress.update(self.running[job.key], completed=event.info)
        else:
            self.ended += 1
            self.progress.advance(self.all)
            if job.key in self.running:
                self.progress.remove_task(self.running.pop(job.key))
            how = str(event.info) if event.kind == "done" else "FAILED"
            line(f"{self.ended}/{self.total} {name} {how}")
