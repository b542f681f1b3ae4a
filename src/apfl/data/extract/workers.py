"""Chunks from worker processes: torch's `DataLoader`, which hands them over in shared memory, and in order.

Workers are forked, as what reads images may be a closure of the user's: this works on Linux alone.
"""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, ForkProcess
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from apfl.data.extract.chunk import Chunk, Reader
from apfl.errors import InputError

__all__ = ["chunks_of_workers"]


def chunks_of_workers(
    reader: Reader, ranges: list[range], workers: int, device: torch.device, *, ahead: int
) -> Iterator[Chunk]:
    """The chunks of these ranges, in order, in pinned memory if they go to an NVIDIA GPU.

    Each worker prepares ``ahead`` chunks before they are asked for.
    """
    forks = _Forks()
    with _calm(), torch.cuda.device(device) if device.type == "cuda" else nullcontext():
        prepared = iter(_loader(reader, ranges, workers, ahead, forks, pin=device.type == "cuda"))
    # torch tells of a worker's death with the next chunk, within five seconds. It would also raise an error at the
    # signal, in the middle of whatever is done then: half a row could be saved.
    handler = _handle_deaths(signal.SIG_DFL)
    try:
        for rows in ranges:
            chunk, death = _next(prepared, forks.started)
            if chunk is None:
                raise _died(reader.samples.where(rows[0]), death)
            yield chunk
    finally:
        del prepared  # ends the workers
        _handle_deaths(handler)


def _next(prepared: Iterator[Chunk], started: Sequence[BaseProcess]) -> tuple[Chunk | None, str]:
    """The next chunk, or how a worker died."""
    try:
        return next(prepared), ""
    except BaseException as error:
        # The last two: it died as it handed a chunk over.
        how = _how_one_died(started) if isinstance(error, RuntimeError | OSError | EOFError) else None
        if how is None:
            raise error.with_traceback(None) from None  # the loader's frames in it would keep the workers alive
        return None, how


def _how_one_died(started: Sequence[BaseProcess]) -> str | None:
    dying = wait([each.sentinel for each in started], timeout=1)
    for each in started:
        if each.sentinel in dying:
            each.join(1)
            code = each.exitcode or 0
            return str(signal.strsignal(-code)) if code < 0 else f"exit code {code}"
    return None


def _died(where: str, how: str) -> InputError:
    return InputError(
        f"a process that decodes images died ({how}) at {where} or soon after it; the memory may be full, or an image "
        "may crash its decoder; the same command resumes, with --workers 0 without such processes"
    )


def _handle_deaths(handler: Any) -> Any:
    """Set what is done when a child ends; gives what was done before. Only the main thread may."""
    with suppress(ValueError):
        return signal.signal(signal.SIGCHLD, handler)
    return signal.SIG_DFL


class _Forks(ForkContext):
    """How workers are started, and those that were."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[BaseProcess] = []

    def Process(self, *arguments: Any, **options: Any) -> BaseProcess:  # type: ignore[override]  # noqa: N802
        self.started.append(ForkProcess(*arguments, **options))
        return self.started[-1]


class _Chunks(Dataset[Chunk]):
    """Item ``rows`` is their chunk, in shared memory."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader

    def __getitem__(self, rows: range) -> Chunk:
        chunk = self.reader.chunk(rows)
        try:  # here, where a lack of memory is an error; the queue to the parent would lose the chunk, and go on
            if chunk.inputs is not None:
                chunk.inputs.share_memory_()  # type: ignore[no-untyped-call]
            return chunk
        except RuntimeError as error:
            why = f"the shared memory (/dev/shm) is full: {error}; give it more, or decode with --workers 0"
            return replace(chunk, inputs=None, refusal=" ".join(why.split()))


def _loader(
    reader: Reader, ranges: list[range], workers: int, ahead: int, forks: _Forks, *, pin: bool
) -> DataLoader[Chunk]:
    return DataLoader(
        _Chunks(reader),
        batch_size=None,
        sampler=ranges,  # an item is a chunk
        collate_fn=_as_it_is,
        num_workers=workers,
        prefetch_factor=ahead,
        multiprocessing_context=forks,
        worker_init_fn=_begin,
        pin_memory=pin,
        generator=torch.Generator(),  # else it would draw from the generator that the caller's results depend on
    )


def _as_it_is(chunk: Any) -> Any:
    return chunk


def _begin(_: int) -> None:
    """In a new worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches every process of a terminal; the parent ends its own
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 (that of the parent may be locked by a thread of its own)


@contextmanager
def _calm() -> Iterator[None]:
    """Without two warnings."""
    with warnings.catch_warnings():
        # Python's, of a fork in a process with threads: a worker uses none of them.
        warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message="This DataLoader will create")  # more than cores, as was asked for
        yield
