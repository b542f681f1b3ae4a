"""Where a long run or a grid stands, in one file, so that it can go on after an interruption.

A safetensors file with the method's state after a whole round; its header says of which run. Never half-written. Of a
grid: the points that are judged, and where the others stand in their training.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apfl.errors import InputError
from apfl.experiments.record import as_read
from apfl.models.file import Container, read, write

__all__ = ["Checkpoint", "Unfinished", "load", "save"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a run had reached: the state after a round, the time so far, and the curve before that round."""

    state: Mapping[str, Tensor]
    seconds: float
    curve: list[list[float]] = field(default_factory=list)


def save(path: Path, run: Any, reached: Checkpoint) -> None:
    """Write the checkpoint; ``run`` (JSON) says what is run."""
    tensors = {name: tensor.cpu().clone() for name, tensor in reached.state.items()}  # none may share memory
    settings = {"run": as_read(run), "seconds": reached.seconds, "curve": reached.curve}
    write(Container("checkpoint", tensors, settings), path)


def load(path: Path, run: Any) -> Checkpoint | None:
    """The checkpoint of ``run``; None if there is no file. One of another run is refused."""
    if not path.exists():
        return None
    container = read(path)
    if container.kind != "checkpoint" or container.settings.get("run") != as_read(run):
        raise InputError(f"{path} is of another run; remove it, or choose another folder")
    curve: Sequence[Sequence[float]] = container.settings["curve"]
    return Checkpoint(container.tensors, float(container.settings["seconds"]), [list(point) for point in curve])


class Unfinished:
    """What an interrupted grid had reached: a stopped one loses nothing, a killed one at most ``seconds``.

    Without a ``path`` nothing is kept.
    """

    def __init__(self, path: Path | None = None, what: Any = None, seconds: float = 60) -> None:
        self.path, self.what, self.seconds = path, what, seconds
        self.judged: dict[int, float] = {}  # accuracies by the point's place in the grid
        self.places: Sequence[int] = ()  # the points that are in training
        self.state: Mapping[str, Tensor] | None = None
        self.written = time.monotonic()
        checkpoint = None if path is None else load(path, what)
        if checkpoint is not None:
            self.judged = {int(place): accuracy for place, accuracy in checkpoint.curve}
            state = dict(checkpoint.state)
            self.places = state.pop("places").tolist()
            self.state = state or None

    def state_of(self, places: Sequence[int]) -> Mapping[str, Tensor] | None:
        """Where these points stand, if they were in training."""
        return self.state if list(places) == list(self.places) else None

    def reached(self, places: Sequence[int], state: Mapping[str, Tensor] | None) -> None:
        """These points have another round behind them."""
        self.places, self.state = places, state
        if time.monotonic() - self.written > self.seconds:
            self._write()

    def judge(self, place: int, accuracy: float) -> None:
        """This point is done."""
        self.judged[place] = accuracy

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Whoever stops the block finds it again."""
        try:
            yield
        except (KeyboardInterrupt, SystemExit):
            self._write()
            raise

    def over(self) -> None:
        """The results are kept elsewhere now."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _write(self) -> None:
        if self.path is not None and (self.state is not None or self.judged):
            state = {**(self.state or {}), "places": torch.tensor(self.places, dtype=torch.int64)}
            save(self.path, self.what, Checkpoint(state, 0.0, [[place, each] for place, each in self.judged.items()]))
        self.written = time.monotonic()
