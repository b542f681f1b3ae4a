"""Files read some rows at a time hold what they hold when they are read whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
import torch

from apfl.data import load_dataset
from apfl.data.streams import open_rows
from apfl.errors import InputError

RNG = np.random.default_rng(0)
X = RNG.normal(size=(503, 5)).astype(np.float32)
WORDS = np.array(["ant", "bee", "cat"])[RNG.integers(3, size=len(X))]
COLUMNS = {f"f{i}": X[:, i] for i in range(5)}


def npy(path: Path) -> None:
    np.save(path, X)
    np.save(path.with_suffix(".labels.npy"), WORDS)


def with_comma(path: Path) -> None:
    rows = [f"{a:.3f};{b:.3f};{word}".replace(".", ",") for a, b, word in zip(X[:, 0], X[:, 1], WORDS, strict=True)]
    path.write_text("f0;f1;label\n" + "\n".join(rows))


WRITERS: dict[str, Callable[[Path], object]] = {
    "words.npz": lambda path: np.savez(path, features=X, labels=WORDS),
    "codes.npz": lambda path: np.savez_compressed(
        path, features=(9 * X).astype(np.int8), scale=np.full(5, 0.5), labels=np.arange(len(X)) % 3,
        class_names=np.array(["x", "y", "z"]),
    ),
    "rows.npy": npy,
    "columns.parquet": lambda path: pq.write_table(
        pa.table({**COLUMNS, "label": WORDS}), path, row_group_size=100
    ),
    "vectors.parquet": lambda path: pq.write_table(
        pa.table({"v": pa.FixedSizeListArray.from_arrays(pa.array(X.reshape(-1)), 5), "label": np.arange(len(X)) % 7}),
        path, row_group_size=77,
    ),
    "lists.parquet": lambda path: pq.write_table(pa.table({"v": X.tolist(), "label": WORDS}), path),
    "rows.csv": lambda path: pa_csv.write_csv(pa.table({**COLUMNS, "label": WORDS}), path),
    "commas.csv": with_comma,
}  # fmt: skip


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("size", [64, 1000])
def test_batches_are_the_file(tmp_path, name, size):
    path = tmp_path / name
    WRITERS[name](path)
    whole, file = load_dataset(str(path)), open_rows(path)
    batches = list(file.batches(size))
    assert [len(each.codes) for each in batches[:-1]] == [size] * (len(batches) - 1)
    assert torch.equal(torch.cat([each.features for each in batches]), whole.features)
    names = [whole.class_names[k] for k in whole.labels]
    assert [each.names[k] for each in batches for k in each.codes] == names
    assert [words[k] for codes, words in file.labels() for k in codes] == names


def test_columns_are_those_asked_for(tmp_path):
    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({**COLUMNS, "kind": WORDS}), path)
    chosen = {"label_column": "kind", "features": "f0,f3", "drop": "f0"}
    (batch,) = open_rows(path, **chosen).batches(1000)
    assert torch.equal(batch.features, torch.from_numpy(X[:, 3:4]))


def test_long_csv_has_one_kind_of_number(tmp_path):
    """The first megabyte has whole numbers only, and the rest has not."""
    path = tmp_path / "t.csv"
    path.write_text("f0,f1,label\n" + "1,2,a\n" * 200_000 + "1.5,2.5,b\n")
    last = list(open_rows(path).batches(2**18))[-1]
    assert last.features[-1].tolist() == [1.5, 2.5]


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda path: path.write_bytes(path.read_bytes()[:-2000]), "cannot be read"),
        (lambda path: np.savez(path, features=X), "no array 'labels'"),
        (lambda path: np.savez(path, features=X, labels=WORDS[:-1]), "503 features but 502 labels"),
        (lambda path: np.savez(path, features=np.asfortranarray(X), labels=WORDS), "column by column"),
        (lambda path: np.savez(path, features=np.full_like(X, np.nan), labels=WORDS), "NaN"),
        (lambda path: np.savez(path, features=X[:0], labels=WORDS[:0]), "no rows"),
    ],
)
def test_npz_that_cannot_be_used(tmp_path, spoil, told):
    path = tmp_path / "t.npz"
    np.savez(path, features=X, labels=WORDS)
    spoil(path)
    with pytest.raises(InputError, match=told):
        list(open_rows(path).batches(100))


def test_refusals_say_what_to_do(tmp_path):
    np.save(tmp_path / "alone.npy", X)
    with pytest.raises(InputError, match=r"put them beside it, as alone\.labels\.npy"):
        open_rows(tmp_path / "alone.npy")
    (tmp_path / "t.json").write_text("{}")
    with pytest.raises(InputError, match=r"\.parquet, \.npz"):
        open_rows(tmp_path / "t.json")
    (tmp_path / "t.parquet").write_text("no table")
    with pytest.raises(InputError, match="cannot be read as parquet"):
        open_rows(tmp_path / "t.parquet")
    (tmp_path / "t.csv").write_text("f0,label\n1,a\n2,\n3,b\n")
    with pytest.raises(InputError, match="row 1, counted from 0"):
        list(open_rows(tmp_path / "t.csv").labels())
    np.savez(tmp_path / "t.npz", features=X, labels=WORDS)
    with pytest.raises(InputError, match="no columns to be named"):
        open_rows(tmp_path / "t.npz", label_column="kind")
    with pytest.raises(InputError, match="name the labels with --label-column"):
        open_rows(tmp_path / "t.csv", label_column="kind")
