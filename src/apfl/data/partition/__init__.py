"""How rows are spread over clients. One recipe for each file, each with

    partition(labels, n_clients, rng, *, ...) -> list of index arrays, every row exactly once

(`given` takes a column instead: real sites or domains), and the split of a client's rows into training and test.
"""

from __future__ import annotations

import importlib
import pkgutil
from types import ModuleType

import numpy as np

from apfl.errors import InputError, unknown

__all__ = ["load_partition", "partition_names", "split"]


def partition_names() -> list[str]:
    """The recipes there are: the public files of this folder."""
    return sorted(module.name for module in pkgutil.iter_modules(__path__) if not module.name.startswith("_"))


def load_partition(name: str) -> ModuleType:
    """A recipe by name."""
    if name not in partition_names():
        raise unknown("partition", name, partition_names())
    return importlib.import_module(f"{__name__}.{name}")


def split(
    rows: np.ndarray, rng: np.random.Generator, *, test_fraction: float = 0.25, groups: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """A client's rows as (training, test), unstratified, as PFLlib does it: shuffle, then cut.

    With ``groups`` (one entry for each of ``rows``) whole groups are shuffled and cut, so none is on both sides.
    At least one row, or group, is kept for training.

    >>> train, test = split(np.arange(8), np.random.default_rng(0))
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
