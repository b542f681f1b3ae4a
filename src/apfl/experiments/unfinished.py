"""A grid that is being tried, on disk: the points that are judged, and where the others stand in their training."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from apfl.experiments.checkpoint import Checkpoint, load, save

__all__ = ["Unfinished"]


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
        found = None if path is None else load(path, what)
        if found is not None:
            self.judged = {int(place): accuracy for place, accuracy in found.curve}
            state = dict(found.state)
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
