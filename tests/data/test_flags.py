"""One rule says which rows are for testing: `apfl run` and `apfl federate join` read a test column alike."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from apfl.data import load_dataset
from apfl.data.protocol import Protocol, federate
from apfl.errors import InputError
from apfl.federate import Site

TEST = np.arange(12) % 3 == 0


def written(path: Path, flags: np.ndarray) -> str:
    """Rows whose only feature is their number."""
    np.savez(path, features=np.arange(12.0)[:, None], labels=np.arange(12) % 2, site=np.zeros(12, int), fold=flags)
    return str(path)


def rows_by_run_and_join(path: str) -> list[list[float]]:
    protocol = Protocol("given", None, client_column="site", test_column="fold")
    simulated = federate(load_dataset(path), protocol, 0).test[0]
    joined = Site.from_file(Path(path).parent, "a", path, test_column="fold").test
    assert joined is not None
    return [shard.features[:, 0].tolist() for shard in (simulated, joined)]


@pytest.mark.parametrize(
    "flags",
    [
        TEST,
        TEST.astype(int),
        TEST.astype(float),
        TEST.astype(np.float32),
        np.where(TEST, "test", "train"),
        np.where(TEST, "True", "False"),
        np.where(TEST, "1", "0"),
    ],
    ids=["bool", "int", "float", "float32", "words", "texts", "digits"],
)
def test_every_way_to_write_a_flag_means_the_same(tmp_path: Path, flags: np.ndarray) -> None:
    assert rows_by_run_and_join(written(tmp_path / "a.npz", flags)) == [[0, 3, 6, 9]] * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (np.arange(12) % 3, r"column 'fold' of a\.npz has 2 in row 2"),
        (np.where(np.arange(12) == 5, 0.5, 1.0), "has 0.5 in row 5"),
        (np.where(np.arange(12) == 7, "validation", "train"), "has validation in row 7"),
    ],
    ids=["folds", "share", "third word"],
)
def test_a_value_that_is_neither_training_nor_test_is_refused(tmp_path: Path, flags: np.ndarray, message: str) -> None:
    path = written(tmp_path / "a.npz", flags)
    with pytest.raises(InputError, match=message):
        federate(load_dataset(path), Protocol("given", None, client_column="site", test_column="fold"), 0)
    with pytest.raises(InputError, match=message):
        Site.from_file(tmp_path, "a", path, test_column="fold")
