"""Tables that are read one at a time choose what all of them together choose."""

from __future__ import annotations

import pytest
import torch

from apfl.federate.choosing import summed_tables
from apfl.maths.hits import bounded, bounded_weights


@pytest.mark.parametrize("n_clients", [1, 2, 3, 4, 17])
@pytest.mark.parametrize("n_weights", [1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_the_sum_is_that_of_all_bounded_tables(n_clients, n_weights, seed):
    generator = torch.Generator().manual_seed(seed)
    n_rows = torch.randint(4, 60, (n_clients,), generator=generator).tolist()
    shape = (2, 3, 2) if n_weights == 1 else (n_weights, 2, 3, 2)
    tables = [torch.randint(0, n + 1, shape, generator=generator) for n in n_rows]
    bound = bounded if n_weights == 1 else bounded_weights
    summed = summed_tables(lambda: zip("abcdefghijklmnopqrs", tables, n_rows, strict=False), n_weights)
    assert torch.equal(summed.hits, torch.stack(bound(tables, n_rows)).sum(0))
    assert (summed.n_rows, summed.hashes) == (sum(n_rows), list("abcdefghijklmnopqrs")[:n_clients])


def test_tables_are_never_held_together():
    alive, most = [], [0]

    class Watched:
        def __init__(self) -> None:
            alive.append(1)
            most[0] = max(most[0], len(alive))

        def __del__(self) -> None:
            alive.pop()

    def read():
        for k in range(50):
            table = torch.full((1, 1, 2), k)
            table.watched = Watched()  # lives as long as the table
            yield str(k), table, 60
            del table

    assert summed_tables(read, 1).n_rows == 50 * 60
    assert most[0] <= 3


def test_no_tables_make_no_sum():
    assert summed_tables(lambda: (), 1).hashes == []
