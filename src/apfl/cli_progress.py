"""How far something has got, for someone who is watching."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from apfl.bench import Event

__all__ = ["Board", "duration", "spinner"]

err = Console(stderr=True)


def duration(seconds: float) -> str:
    """A rough time in words.

    >>> duration(40), duration(400), duration(40_000)
    ('1 minute', '7 minutes', '11 hours')
    """
    minutes = max(1, round(seconds / 60))
    n, unit = (minutes, "minute") if minutes < 120 else (round(minutes / 60), "hour")
    return f"{n} {unit}{'s' * (n > 1)}"


def spinner() -> Progress:
    """For what cannot say how much of it is left."""
    return Progress(SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn(), console=err, transient=True)


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

    def show(self, event: Event) -> None:
        name = f"tuning {event.job.key}" if event.job.tuning else event.job.key
        if event.kind == "begun":
            rounds = 1 if event.job.tuning else getattr(event.job.cell.method, "n_rounds", 1)
            self.running[event.job.key] = self.progress.add_task(name, total=rounds)
        elif event.kind == "round":
            self.progress.update(self.running[event.job.key], completed=event.info)
        else:
            self.ended += 1
            self.progress.advance(self.all)
            if event.job.key in self.running:
                self.progress.remove_task(self.running.pop(event.job.key))
            if not err.is_terminal:
                how = f"{100 * event.info:.2f} %" if event.kind == "done" else "FAILED"
                err.print(f"{self.ended}/{self.total} {name} {how}", soft_wrap=True, highlight=False)
