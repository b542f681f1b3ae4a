"""Jobs of a Slurm cluster, through submitit: one for each item, submitted from a login node that stays connected.

A job that reaches its time limit or is preempted is queued again, and goes on from its checkpoint. All nodes must see
this installation, the data and the folder of results under the same paths.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apfl.data.executors import Executor, Work, attempt
from apfl.data.executors.cluster import Handed, HandedIn
from apfl.data.executors.local import limit_threads
from apfl.data.executors.notes import Note
from apfl.errors import InputError, optional

__all__ = ["Slurm"]

AT_A_TIME = 100  # jobs that are queued or running
MINUTES = 240  # of a job, unless options say otherwise


@dataclass(frozen=True)
class Slurm(Executor):
    """``n_workers`` jobs at a time with so many threads each; ``options`` are Slurm's: time, partition, account ...

    ``cluster`` is submitit's: ``local`` runs jobs as processes of this machine, ``debug`` in this process.
    """

    folder: Path
    n_workers: int | None = None
    threads: int = 1
    gpu: bool = False
    options: Mapping[str, str] = field(default_factory=dict)
    cluster: str = "slurm"

    def __post_init__(self) -> None:
        minutes = self.options.get("time", str(MINUTES))
        if not minutes.isdigit() or int(minutes) < 1:
            raise InputError(f"--slurm time={minutes} given; give whole minutes, for example time=240")

    def team(self, work: Work, n_items: int) -> _Jobs:
        """Look for the cluster; a job is submitted for each item."""
        return _Jobs(work, min(self.n_workers or AT_A_TIME, n_items), self)


class _Jobs(HandedIn):
    def __init__(self, work: Work, size: int, engine: Slurm) -> None:
        submitit = optional("submitit", "slurm")
        super().__init__(work, size, engine.folder)
        self.call = _Call(work, engine.threads)
        try:
            self.engine = submitit.AutoExecutor(folder=self.folder / "jobs", cluster=engine.cluster)
            self.engine.update_parameters(**_parameters(engine))
        except (RuntimeError, ValueError, NameError, TypeError, AssertionError) as error:
            self.stop()
            raise InputError(
                f"no Slurm cluster can be used ({' '.join(str(error).split())}); run this where sbatch is, and check "
                "--slurm"
            ) from error

    def hand_in(self, item: Any, note: Note) -> Any:
        try:
            return self.engine.submit(self.call, item, note)
        except (OSError, RuntimeError) as error:  # sbatch refuses it
            raise InputError(f"Slurm takes no job ({' '.join(str(error).split())[:500]}); check --slurm") from error

    def outcomes(self) -> Mapping[int, tuple[str, Any]]:
        over = {k: _outcome(each.ticket) for k, each in enumerate(self.handed) if each.ticket.done()}
        if not over:
            time.sleep(self.pause)
        return over

    def cancel(self, handed: Handed, *, force: bool) -> None:
        with suppress(Exception):  # one that is over
            handed.ticket.cancel()


def _parameters(engine: Slurm) -> dict[str, Any]:
    given = {"time": str(MINUTES)} | dict(engine.options)
    minutes = given.pop("time")
    others = {f"slurm_{name}": int(value) if value.isdigit() else value for name, value in given.items()}
    gpus = {"gpus_per_node": 1} if engine.gpu else {}
    return {"timeout_min": int(minutes), "cpus_per_task": engine.threads, **gpus, **others}


def _outcome(job: Any) -> tuple[str, Any]:
    try:
        kind, info = job.result()
        return kind, info
    except Exception as error:  # submitit's, with the end of the job's log
        lines = [line for line in str(error).splitlines() if line.strip()]
        return "failed", f"its job {job.job_id} ended without a result ({(lines or ['no reason given'])[0].strip()})"


@dataclass(frozen=True)
class _Call:
    """What a job runs; ``checkpoint`` is what submitit looks for if a job has to be queued again."""

    work: Work
    threads: int

    def __call__(self, item: Any, note: Note) -> tuple[str, Any]:
        limit_threads(self.threads)
        return attempt(self.work, item, note)

    def checkpoint(self, item: Any, note: Note) -> Any:
        return optional("submitit.helpers", "slurm").DelayedSubmission(self, item, note)
