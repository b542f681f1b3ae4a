"""A pass by many processes or machines: one part for each shard, then the sum, which has the bytes of a single pass.

Parts of finished shards stand in OUT.parts until all are there, so that the same command goes on after a stop.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apfl.data.executors import Executor, Tell
from apfl.errors import InputError
from apfl.federate.stats.parts import Part, add_parts, read_part, write_part
from apfl.federate.stats.passes import Pass, file_state
from apfl.federate.stats.stages import Stage, stage_of
from apfl.federate.terms import Terms

__all__ = ["summed_on"]


def summed_on(
    executor: Executor,
    terms: Terms,
    landmarks: bytes | None,
    files: Sequence[Path],
    out: Path,
    options: Mapping[str, Any],
    share: float,
    n_threads: int,
    show: Callable[[int, int], None] = lambda done, total: None,
) -> Part:
    """The part of all files, each summed up wherever the executor has room, written to ``out``."""
    stage = stage_of(terms, landmarks)
    Pass(stage, files, out, options, share)  # refuses what is wrong before anything is done
    folder = out.absolute().with_name(f"{out.name}.parts")
    work = _Summing(terms.to_json(), landmarks, dict(options), share, n_threads)
    places = {path: folder / f"{_identity(path, work)}.safetensors" for path in map(Path.absolute, files)}
    items = [(str(path), str(place)) for path, place in places.items() if not place.is_file()]
    done, why = len(places) - len(items), ""
    show(done, len(places))
    for event in executor.map(work, items):
        if event.kind == "done":
            done += 1
            show(done, len(places))
        elif event.kind == "failed":
            why = why or f"{event.item[0]}: {str(event.info).strip().splitlines()[-1]}"
    if why:
        raise InputError(f"{why}; the parts of finished shards are in {folder}, and the same command goes on")
    part = add_parts((str(path), read_part(place, stage)) for path, place in sorted(places.items()))
    write_part(part, out)
    shutil.rmtree(folder, ignore_errors=True)
    return part


@dataclass
class _Summing:
    """What is done with a shard."""

    terms: str
    landmarks: bytes | None
    options: dict[str, Any]
    share: float
    n_threads: int
    kept: list[Stage] = field(default_factory=list, compare=False)  # the stage, from one shard to the next

    def __call__(self, item: tuple[str, str], tell: Tell) -> int:
        path, place = item
        if not self.kept:
            self.kept.append(stage_of(Terms.from_json(self.terms), self.landmarks))
        made = Pass(
            self.kept[0], [Path(path)], Path(place), self.options, self.share,
            show=lambda done, total: tell(done / max(total, 1)), n_threads=self.n_threads,
        ).run()  # fmt: skip
        return made.n_samples

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) | {"kept": []}


def _identity(path: Path, work: _Summing) -> str:
    """Another file, or other terms or options, is another part."""
    told = [str(path), file_state(path), Terms.from_json(work.terms).digest, work.options, work.share, work.n_threads]
    return hashlib.sha256(json.dumps(told).encode()).hexdigest()[:32]
