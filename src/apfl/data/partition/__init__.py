"""How rows are spread over clients. One recipe for each file, each with

    partition(labels, n_clients, rng, *, ...) -> list of index arrays, every row exactly once

and the split of a client's rows into training and test. A recipe declares its options as keyword arguments: ``alpha``,
``minimum`` and ``classes_per_client`` are the protocol's; ``column`` or ``domains`` is the client column, row by row.
A recipe from outside is found by its entry point of the group ``apfl.partitions``, or by its path,
``./mine.py:partition``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import attrgetter

import numpy as np

from apfl.data.registry import Registry
from apfl.errors import InputError

__all__ = ["COLUMNS", "PARTITIONS", "load_partition", "options_of", "partition_names", "split"]

PARTITIONS = Registry("partition", "apfl.data.partition", "apfl.partitions", attrgetter("partition"))
COLUMNS = ("column", "domains")  # the options that are the client column


def partition_names() -> list[str]:
    """The recipes there are: the public files of this folder, and those of installed distributions."""
    return PARTITIONS.names()


def load_partition(name: str) -> Callable[..., list[np.ndarray]]:
    """A recipe, by name or by path."""
    recipe: Callable[..., list[np.ndarray]] = PARTITIONS.load(name)
    return recipe


def options_of(name: str) -> dict[str, bool]:
    """The keyword options of a recipe, and whether each must be given.

    >>> options_of("dirichlet")
    {'alpha': True, 'minimum': False}
    """
    parameters = inspect.signature(load_partition(name)).parameters.values()
    return {each.name: each.default is each.empty for each in parameters if each.kind is each.KEYWORD_ONLY}


def split(
    rows: np.ndarray, rng: np.random.Generator, *, test_fraction: float, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A client's rows as (training, test), unstratified, as PFLlib does it: shuffle, then cut.

    With ``groups`` (one entry for each of ``rows``) whole groups are shuffled and cut, so none is on both sides.
    At least one row, or group, is kept for training.

    >>> train, test = split(np.arange(8), np.random.default_rng(0), test_fraction=0.25)
    >>> len(train), len(test)
    (6, 2)
    """
    if not 0 <= test_fraction < 1:
        raise InputError(f"test fraction {test_fraction} given; it must be at least 0 and less than 1")
    if groups is None:
        shuffled = rng.permutation(rows)
        cut = len(rows) - int(len(rows) * test_fraction)
        return np.sort(shuffled[:cut]), np.sort(shuffled[cut:])
    names, member = np.unique(groups, return_inverse=True)
    order = rng.permutation(len(names))
    test_groups = order[len(names) - int(len(names) * test_fraction) :]
    in_test = np.isin(member, test_groups)
    return rows[~in_test], rows[in_test]
