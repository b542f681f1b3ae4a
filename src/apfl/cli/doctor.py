"""``apfl doctor``: what is installed, what this machine has, and what fits."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, metadata, requires, version
from pathlib import Path
from typing import Annotated

import torch
import typer
from packaging.requirements import Requirement
from threadpoolctl import threadpool_info

import apfl
from apfl.cli.progress import out
from apfl.federate.flower.peers import knows_users
from apfl.maths.machine import available, n_cores, widest

__all__ = ["doctor"]

CORE = ("torch", "numpy", "scipy", "scikit-learn")
PEOPLE = ("all", "dev", "docs")  # extras of those who work on apfl itself
ROWS = 10_000


def doctor(
    rows: Annotated[int, typer.Option(help="Number of training rows to find the largest width for.", min=1)] = ROWS,
) -> None:
    """Show versions, threads, devices, missing extras and the width that fits. Paste it into a bug report."""
    for name, words in _findings(rows):
        out.print(f"{name:<13} {words}", soft_wrap=True, highlight=False)


def _findings(rows: int) -> Iterator[tuple[str, str]]:
    yield "apfl", f"{apfl.__version__} in {Path(apfl.__file__).parent}"
    yield "python", f"{platform.python_version()} in {sys.prefix}; {platform.platform()}"
    yield "versions", ", ".join(f"{name} {version(name)}" for name in CORE)
    yield from (("blas", words) for words in _blas())
    threads = os.environ.get("OMP_NUM_THREADS")
    yield (
        "threads",
        f"{torch.get_num_threads()} of torch, {n_cores()} cores" + (f", OMP_NUM_THREADS={threads}" if threads else ""),
    )
    yield from (("device", words) for words in _devices())
    yield from (("extra", words) for words in _extras())
    yield "memory", _memory(rows)
    yield "system", _system()


def _blas() -> list[str]:
    """Each pool of threads once; two copies of one library are two pools."""
    pools = (each for each in threadpool_info() if each["user_api"] in ("blas", "openmp"))
    return [
        f"{each['internal_api']} {each.get('version') or ''} with {each['num_threads']} thread"
        f"{'s' * (each['num_threads'] != 1)} ({Path(each['filepath']).name})".replace("  ", " ")
        for each in pools
    ]


def _devices() -> list[str]:
    names = ["cpu"]
    for index in range(torch.cuda.device_count()):
        names.append(f"cuda:{index} {torch.cuda.get_device_name(index)}")
    if torch.backends.mps.is_available():
        names.append("mps (for the backbone only)")
    built = "" if torch.version.cuda else "; this torch was built without CUDA"
    return [*names[:-1], names[-1] + (built if len(names) == 1 else "")]


def _extras() -> list[str]:
    names = [name for name in metadata("apfl").get_all("Provides-Extra") or [] if name not in PEOPLE]
    return [_extra(name) for name in names]


def _extra(name: str) -> str:
    """Whether the packages of an extra are there, in versions that apfl takes."""
    wanted = map(Requirement, requires("apfl") or [])
    faults = [
        fault
        for each in wanted
        if each.marker and not each.marker.evaluate({"extra": ""}) and each.marker.evaluate({"extra": name})
        if (fault := _fault(each))
    ]
    return f"{name}: installed" if not faults else f"{name}: {', '.join(faults)}; pip install 'apfl[{name}]'"


def _fault(wanted: Requirement) -> str:
    try:
        found = version(wanted.name)
    except PackageNotFoundError:
        return f"no {wanted.name}"
    return (
        "" if wanted.specifier.contains(found, prereleases=True) else f"{wanted.name} {found} is not {wanted.specifier}"
    )


def _memory(rows: int) -> str:
    free = available(torch.device("cpu"))
    if free is None:
        return "this system does not say how much is free"
    width = widest(rows, torch.get_num_threads(), torch.device("cpu"))
    fits = f"d_primary up to {width} fits" if width else "no width fits"
    return f"{free / 1e9:.1f} GB free: with {rows} training rows {fits}"


def _system() -> str:
    if os.name != "posix":
        return "runs and the estimator work; `apfl federate` needs Linux or macOS"
    if not knows_users():
        return "federations: cannot ask the kernel who opened a connection; use a machine that others do not use"
    return "runs, the estimator and federations work"
