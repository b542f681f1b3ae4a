"""What Ray and Slurm have in common: items are handed in, asked about every so often, and fetched."""

from __future__ import annotations

import shutil
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apfl.data.executors import GRACE, Event, Work
from apfl.data.executors.notes import Note
from apfl.files import cannot_write

__all__ = ["Handed", "HandedIn"]


@dataclass
class Handed:
    """An item that is on its way: ``ticket`` is what the engine knows it by."""

    item: Any
    ticket: Any
    note: Note
    said: float | None = None


class HandedIn(ABC):
    """A team whose members are elsewhere; ``folder`` is a scratch folder that all of them see."""

    pause = 0.5  # seconds between two questions

    def __init__(self, work: Work, size: int, folder: Path) -> None:
        self.work, self.size = work, size
        self.folder = folder / f"{uuid.uuid4().hex[:12]}"
        self.handed: list[Handed] = []
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            raise cannot_write(folder, error) from error

    @abstractmethod
    def hand_in(self, item: Any, note: Note) -> Any:
        """Hand an item to the engine; what it is known by."""

    @abstractmethod
    def outcomes(self) -> Mapping[int, tuple[str, Any]]:
        """The places in ``handed`` that are over, each with ``done`` or ``failed`` and what came of it; may wait."""

    @abstractmethod
    def cancel(self, handed: Handed, *, force: bool) -> None:
        """Ask for an item to be stopped, or with ``force`` stop it."""

    @property
    def busy(self) -> list[Any]:
        return [each.item for each in self.handed]

    @property
    def n_idle(self) -> int:
        return self.size - len(self.handed)

    def give(self, item: Any) -> None:
        note = Note(self.folder / f"{uuid.uuid4().hex}.note")
        self.handed.append(Handed(item, self.hand_in(item, note), note))

    def listen(self) -> list[Event[Any]]:
        outcomes = self.outcomes()
        events = [Event(kind, self.handed[k].item, info) for k, (kind, info) in outcomes.items()]
        for k in outcomes:
            self.handed[k].note.remove()
        self.handed = [each for k, each in enumerate(self.handed) if k not in outcomes]
        for each in self.handed:
            reached = each.note.read()
            if reached is not None and reached != each.said:
                each.said = reached
                events.append(Event("reached", each.item, reached))
        return events

    def stop(self) -> None:
        for force in (False, True):
            for each in self.handed:
                self.cancel(each, force=force)
            until = time.monotonic() + GRACE
            while self.handed and time.monotonic() < until and not force:
                over = self.outcomes()
                self.handed = [each for k, each in enumerate(self.handed) if k not in over]
        self.handed = []
        shutil.rmtree(self.folder, ignore_errors=True)
        with suppress(OSError):  # another team is in it
            self.folder.parent.rmdir()
