"""Where a long run stands, in one file, so that it can go on after an interruption.

A safetensors file with the method's state after a whole round; its header says of which run. Never half-written.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from apfl.errors import InputError
from apfl.models.file import Container, read, write

__all__ = ["Checkpoint", "load", "save"]


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """What a run had reached: the state after a round, the time so far, and the curve before that round."""

    state: Mapping[str, Tensor]
    seconds: float
    curve: list[list[float]] = field(default_factory=list)


def save(path: Path, run: Any, reached: Checkpoint) -> None:
    """Write the checkpoint; ``run`` (JSON) says what is run."""
    tensors = {name: tensor.cpu().clone() for name, tensor in reached.state.items()}  # none may share memory
    settings = {"run": _plain(run), "seconds": reached.seconds, "curve": reached.curve}
    write(Container("checkpoint", tensors, settings), path)


def load(path: Path, run: Any) -> Checkpoint | None:
    """The checkpoint of ``run``; None if there is no file. One of another run is refused."""
    if not path.exists():
        return None
    container = read(path)
    if container.kind != "checkpoint" or container.settings.get("run") != _plain(run):
        raise InputError(f"{path} is of another run; remove it, or choose another folder")
    curve: Sequence[Sequence[float]] = container.settings["curve"]
    return Checkpoint(container.tensors, float(container.settings["seconds"]), [list(point) for point in curve])


def _plain(value: Any) -> Any:
    return json.loads(json.dumps(value))
