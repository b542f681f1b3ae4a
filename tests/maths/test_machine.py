"""How many clients at a time, and whether a run fits."""

from __future__ import annotations

import logging
import os
import threading

import pytest
import torch
from threadpoolctl import threadpool_info

from apfl.errors import InputError
from apfl.maths import machine, memory

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def threads():
    """torch's threads are the process's: each test leaves them as they were."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_worker_for_each_thread_and_no_more_than_clients():
    torch.set_num_threads(3)
    assert [machine.n_workers(n, CPU) for n in (0, 1, 2, 3, 9)] == [1, 1, 2, 3, 3]
    assert machine.n_workers(9, GPU) == 1


@pytest.mark.parametrize(("threads", "expected"), [(1, 1), (2, 2), (3, 3)])
def test_clients_are_worked_on_side_by_side_with_one_thread_each(threads, expected):
    torch.set_num_threads(threads)
    together = threading.Barrier(expected, timeout=20)  # breaks if fewer are at work

    def work(k: int) -> tuple[int, int]:
        together.wait()
        return k, torch.get_num_threads()

    assert machine.over_clients(work, range(6), CPU) == [(k, 1) for k in range(6)]
    assert torch.get_num_threads() == threads


def test_cores_are_those_the_process_may_use(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", {0: {0, 3, 5}}.__getitem__, raising=False)
    assert machine.n_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")  # as on a Mac
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert machine.n_cores() == 8
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert machine.n_cores() == 1


def test_memory_is_that_of_sums_system_factor_and_rows():
    squares, rows = 8 * 1000**2, 4 * 1000 * 600
    assert memory.of_run(1000, 600, workers=3) == 1.125 * (5 * squares + rows)


def test_what_just_fits_is_allowed_and_what_nobody_knows_too(monkeypatch):
    take = memory.of_run(256, 50, 1)
    for have in (take, take + 1, None):
        monkeypatch.setattr(machine, "available", lambda device, have=have: have)
        machine.check_width(256, 50, 1, CPU)
    monkeypatch.setattr(machine, "available", lambda device: take - 1)
    with pytest.raises(InputError, match=r"the widest power of two that fits is d_primary=128$"):
        machine.check_width(256, 50, 1, CPU)


@pytest.mark.parametrize(("width", "remedy"), [(16, "d_primary=16$"), (8, "use fewer rows or another machine$")])
def test_the_narrowest_width_advised_is_sixteen(monkeypatch, width, remedy):
    monkeypatch.setattr(machine, "available", lambda device: memory.of_run(width, 50, 1))
    with pytest.raises(InputError, match=remedy):
        machine.check_width(4096, 50, 1, CPU)


def test_large_runs_say_what_they_take(monkeypatch, caplog):
    monkeypatch.setattr(machine, "available", lambda device: None)
    caplog.set_level(logging.INFO)
    machine.check_width(4096, 50, 1, CPU)  # 0.5 GB
    assert not caplog.messages
    machine.check_width(8192, 50, 1, CPU)
    assert caplog.messages == ["width 8192 for 50 rows takes about 1.8 GB of memory"]


def test_threads_are_set_for_a_while_and_put_back_also_after_a_failure():
    torch.set_num_threads(3)
    with machine.threads(2):
        assert torch.get_num_threads() == 2
        assert {pool["num_threads"] for pool in threadpool_info()} == {2}
    assert torch.get_num_threads() == 3
    with pytest.raises(ZeroDivisionError), machine.threads(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 3
    with machine.threads(None):
        assert torch.get_num_threads() == 3


@pytest.mark.parametrize("n", [0, -1, 1.5, True, "2"])
def test_threads_that_cannot_be_are_refused(n):
    with (
        pytest.raises(InputError, match=f"threads={n!r} given; allowed: a whole number of at least 1"),
        machine.threads(n),
    ):
        pass
