"""Tasks of a Ray cluster: the one that `RAY_ADDRESS` names or that runs on this machine, else one that is started.

A cluster's machines must have apfl installed, and see the data and the folder of results under the same paths.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from apfl.data.executors import Executor, Work, attempt
from apfl.data.executors.cluster import Handed, HandedIn
from apfl.data.executors.local import THREADS, limit_threads
from apfl.data.executors.notes import Note
from apfl.errors import InputError, optional

__all__ = ["Ray"]

_at_hand: dict[str, Work] = {}  # in a process of Ray: the work of the last item, with what it keeps


@dataclass(frozen=True)
class Ray(Executor):
    """``n_workers`` tasks at a time (default: as many as the cluster has cores for), with so many threads each."""

    folder: Path
    n_workers: int | None = None
    threads: int = 1
    gpu: bool = False

    def team(self, work: Work, n_items: int) -> _Tasks:
        """Connect to the cluster."""
        ray = optional("ray", "ray")
        if not ray.is_initialized():
            try:
                ray.init(log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)
            except (ConnectionError, RuntimeError, ValueError, OSError) as error:
                first = str(error).strip().splitlines()[0]
                raise InputError(
                    f"no Ray cluster can be reached ({first}); start one with `ray start --head`, name it in "
                    "RAY_ADDRESS, or use --on local"
                ) from error
        return _Tasks(work, min(self._size(ray), n_items), self)

    def _size(self, ray: Any) -> int:
        have = ray.cluster_resources()
        fits = int(have.get("GPU" if self.gpu else "CPU", 0)) // (1 if self.gpu else self.threads)
        if not fits:
            what = "a GPU" if self.gpu else f"{self.threads} cores"
            raise InputError(f"no machine of the Ray cluster has {what}; use fewer --threads, or another cluster")
        return fits if self.n_workers is None else self.n_workers


class _Tasks(HandedIn):
    def __init__(self, work: Work, size: int, engine: Ray) -> None:
        super().__init__(work, size, engine.folder)
        self.ray = optional("ray", "ray")
        self.name, self.stored, self.threads = uuid.uuid4().hex, self.ray.put(work), engine.threads
        environment = {"env_vars": dict.fromkeys(THREADS, str(engine.threads))}
        self.remote = self.ray.remote(_attempted).options(
            max_retries=0, num_cpus=engine.threads, num_gpus=int(engine.gpu), runtime_env=environment
        )

    def hand_in(self, item: Any, note: Note) -> Any:
        # In a list, so that Ray unpickles neither before the work is there.
        return self.remote.remote(self.name, [self.stored, self.ray.put(item)], self.threads, note)

    def outcomes(self) -> Mapping[int, tuple[str, Any]]:
        tickets = [each.ticket for each in self.handed]
        over, _ = self.ray.wait(tickets, num_returns=len(tickets), timeout=self.pause)
        return {tickets.index(ticket): self._outcome(ticket) for ticket in over}

    def _outcome(self, ticket: Any) -> tuple[str, Any]:
        try:
            kind, info = self.ray.get(ticket)
            return kind, info
        except self.ray.exceptions.RayError as error:
            why = " ".join(str(error).split())[:300]
            return "failed", f"its process ended on Ray ({type(error).__name__}: {why})"

    def cancel(self, handed: Handed, *, force: bool) -> None:
        self.ray.cancel(handed.ticket, force=force)


def _attempted(name: str, stored: list[Any], threads: int, note: Note) -> tuple[str, Any]:
    """In a process of Ray, which is used again for the next item."""
    ray = optional("ray", "ray")
    if name not in _at_hand:
        _at_hand.clear()
        limit_threads(threads)
        _at_hand[name] = ray.get(stored[0])
    return attempt(_at_hand[name], ray.get(stored[1]), note)
