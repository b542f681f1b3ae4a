"""One function over many items, wherever there are processors. One seam, `Executor.map`, and one file for each engine:

    local    processes of this machine
    ray      a Ray cluster, or processes that Ray starts on this machine
    slurm    jobs of a Slurm cluster, through submitit

A process that dies costs the item it had. Whatever an item makes is on disk before its event comes, so stopping loses
nothing that was finished.
"""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from apfl.errors import InputError

__all__ = ["ENGINES", "GRACE", "Event", "Executor", "Team", "Tell", "Work", "attempt"]

ENGINES = ("local", "ray", "slurm")
GRACE = 30.0  # seconds that what is stopped has to write its checkpoint

T = TypeVar("T")
Tell = Callable[[float], None]  # says how far an item has got


class Work(Protocol):
    """What is done with an item. It travels to other processes, and may keep what it loads from one item to the next.

    An item may be of a class that only the work's own unpickling makes known: the work comes first.
    """

    def __call__(self, item: Any, tell: Tell, /) -> Any: ...


@dataclass(frozen=True)
class Event(Generic[T]):
    """Something happened to an item: ``begun``, ``reached``, ``done``, ``failed``; ``left`` if what it needs failed."""

    kind: str
    item: T
    info: Any = None  # how far it has got, what came of it, or why it failed


class Team(Protocol):
    """Some places to work at, each with an item or idle."""

    @property
    def busy(self) -> list[Any]: ...

    @property
    def n_idle(self) -> int: ...

    def give(self, item: Any) -> None: ...

    def listen(self) -> list[Event[Any]]:
        """What happened since; waits for something to happen."""

    def stop(self) -> None:
        """End what is running, with `GRACE` seconds to write down where it stands."""


class Executor(ABC):
    """Where work is done."""

    @abstractmethod
    def team(self, work: Work, n_items: int) -> Team:
        """Places to do this work at, as many as there are items at most."""

    def map(
        self, work: Work, items: Sequence[T], needs: Callable[[T], T | None] = lambda item: None
    ) -> Iterator[Event[T]]:
        """Do the work on every item, in any order; what happens is yielded. Leaving the generator stops what runs.

        An item waits for the one that it ``needs``, and is left if that fails.
        """
        waiting, lost = list(items), list[T]()
        if not waiting:
            return
        team = self.team(work, len(waiting))
        try:
            while waiting or team.busy:
                while (left := next((item for item in waiting if _is_in(lost, needs(item))), None)) is not None:
                    waiting.remove(left)
                    lost.append(left)
                    yield Event("left", left)
                under_way = [*waiting, *team.busy]
                ready = [item for item in waiting if not _is_in(under_way, needs(item))]
                for item in ready[: team.n_idle]:
                    waiting.remove(item)
                    team.give(item)
                    yield Event("begun", item)
                for event in team.listen() if team.busy else ():
                    if event.kind == "failed":
                        lost.append(event.item)
                    yield event
        finally:
            team.stop()


def _is_in(items: Sequence[Any], item: Any) -> bool:
    return item is not None and any(each == item for each in items)


def attempt(work: Work, item: Any, tell: Tell) -> tuple[str, Any]:
    """``done`` with what came of it, or ``failed`` with the reason: a sentence if the input is to blame."""
    try:
        return "done", work(item, tell)
    except InputError as error:
        return "failed", " ".join(str(error).split())
    except Exception:
        return "failed", traceback.format_exc()
