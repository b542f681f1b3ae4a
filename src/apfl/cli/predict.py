"""``apfl predict``: one client's model on new rows, offline."""

from __future__ import annotations

import csv
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from torch import Tensor

from apfl.cli.features import extract_aloud
from apfl.cli.options import TABLE, DeviceOption, data_options
from apfl.cli.progress import err
from apfl.data.federation import Dataset
from apfl.data.fitted_features import check_backbone, named_backbone, other_backbone
from apfl.data.load import Source, load_unlabelled_data
from apfl.data.sources.vectors import accepts as is_table
from apfl.errors import InputError, optional, printable
from apfl.files import replacing
from apfl.maths.encoding import Encoding
from apfl.models.base import ClientModel
from apfl.models.file import Model, about, model_of, read
from apfl.models.predict import HALF, numbers_of
from apfl.models.undecided import in_words, undecided

__all__ = ["predict", "whose"]

OWN = ("predicted", "score")  # columns of the output, which an id column cannot be called
SAMPLES = ("backbone", "pooling", "backbone_revision", "image_column", "text_column", "on_corrupt")


@data_options(only=(*TABLE, *SAMPLES))
def predict(
    model: Annotated[Path, typer.Argument(help="Model of one client, as written by `apfl run` or `apfl export`.")],
    file: Annotated[
        str,
        typer.Argument(
            help="Rows to predict, with or without labels: a features file, a table, images, texts or 'digits', as for "
            "`apfl run --data`; also a folder of photos without class folders."
        ),
    ],
    target: Annotated[
        Path | None,
        typer.Option("--out", help="CSV or Parquet file to write. \\[default: standard output]", show_default=False),
    ] = None,
    id_column: Annotated[str | None, typer.Option(help="Column of the rows to repeat in the output.")] = None,
    probabilities: Annotated[
        bool, typer.Option("--probabilities", help="Write a probability for each class, in a column of its name.")
    ] = False,
    device: DeviceOption = "auto",
    *,
    source: Source,
) -> None:
    """Predict with one client's model, offline. If FILE has labels, print the accuracy too.

    The model says which columns of a table are its features, and which backbone made features of images or texts.
    A row that cannot be scored, such as a row of zeros, has no class and no score in the output. Standard error lists
    it.
    """
    container = read(model)
    loaded, facts = model_of(container), about(container)
    dataset = _rows(replace(source, data=file), facts, device)
    scores = loaded.scores(dataset.features)
    if facts.get("target", "classification") != "classification":
        _predict_targets(loaded, facts, dataset, scores, target, id_column, probabilities)
        return
    reasons = undecided(loaded, dataset.features, scores)
    names = list(loaded.class_names or [str(i) for i in range(scores.shape[1])])
    best = zip(scores.argmax(1).tolist(), reasons.tolist(), strict=True)
    predicted = [None if reason else names[i] for i, reason in best]
    columns = _ids(dataset, id_column) | {"predicted": predicted, "score": _numbers(scores.amax(1), reasons)}
    if probabilities:
        columns |= _probabilities(loaded, scores, reasons, names, set(columns))
    _write(columns, target, whose(facts))
    if bool(reasons.any()):
        err.print(f"{in_words(reasons)}; these are left empty", soft_wrap=True, highlight=False)
    _tell_accuracy(dataset, predicted, names)


def _predict_targets(
    model: ClientModel,
    facts: Mapping[str, Any],
    dataset: Dataset,
    scores: Tensor,
    target: Path | None,
    id_column: str | None,
    probabilities: bool,
) -> None:
    """Write a column for each number or label, under its name."""
    if probabilities:
        raise InputError(f"--probabilities given, but this model is for {facts['target']}: leave it out")
    names = list(model.class_names or [str(i) for i in range(scores.shape[1])])
    if facts["target"] == "regression":
        found: list[list[Any]] = numbers_of(facts, scores).T.tolist()
    else:
        found = (scores > HALF).long().T.tolist()
    ids = _ids(dataset, id_column)
    headers = [f"predicted {name}" for name in names]
    _write(ids | dict(zip(headers, found, strict=True)), target, whose(facts))


def whose(facts: Mapping[str, Any]) -> str:
    """Whose model it is, if its file says so.

    >>> whose({"client": "North"}), whose({})
    (', by the model of client North', '')
    """
    return f", by the model of client {printable(facts['client'], 100)}" if "client" in facts else ""


def _rows(source: Source, facts: Mapping[str, Any], device: str) -> Dataset:
    """The rows, with the features that the model was fitted to."""
    asked = source.features or source.feature_column or source.drop
    stated = facts.get("encoding") if is_table(source.data) and not asked and source.encode is None else None
    named = facts.get("feature_names") if is_table(source.data) and not asked and stated is None else None
    try:
        dataset = load_unlabelled_data(
            source, device=device, extract=extract_aloud, stated=named_backbone(facts),
            features=[str(name) for name in named] if named else None,
            encoding=None if stated is None else Encoding.from_dict(stated),
        )  # fmt: skip
    except InputError as error:
        raise InputError(f"{error}{other_backbone(facts, source)}") from error
    check_backbone(facts, dataset)
    return dataset


def _ids(dataset: Dataset, id_column: str | None) -> dict[str, list[Any]]:
    """The number of each row, and its entry in the id column; images of a folder have their paths."""
    skipped = set(dataset.provenance.get("skipped_rows", ()))  # rows that have no features
    all_rows = range(len(dataset.labels) + len(skipped))
    rows: dict[str, list[Any]] = {"row": [row for row in all_rows if row not in skipped]}
    if id_column is None:
        is_extracted = "key" in dataset.provenance and not dataset.name.endswith(".npz")
        return rows | ({"path": dataset.columns["path"].tolist()} if is_extracted and "path" in dataset.columns else {})
    if id_column in OWN:
        raise InputError(f"--id-column {id_column} given, but the output has a column of that name; rename yours")
    return rows | {id_column: dataset.column(id_column).tolist()}


def _numbers(values: Tensor, reasons: Tensor) -> list[float | None]:
    return [None if reason else value for value, reason in zip(values.tolist(), reasons.tolist(), strict=True)]


def _probabilities(
    model: Model, scores: Tensor, reasons: Tensor, names: Sequence[str], taken: set[str]
) -> dict[str, list[float | None]]:
    """softmax(scores / temperature), a column for each class."""
    temperature = getattr(model, "temperature", 1.0)
    if temperature is None:
        err.print(
            "this model has no temperature: its probabilities are in the right order, but not calibrated (those of "
            "APFLClassifier are)", soft_wrap=True, highlight=False,
        )  # fmt: skip
    shares = torch.softmax(scores.double() / (temperature or 1.0), 1)
    clash = taken & set(names)
    headers = [f"probability of {name}" if clash else name for name in names]
    return {header: _numbers(shares[:, i], reasons) for i, header in enumerate(headers)}


def _tell_accuracy(dataset: Dataset, predicted: Sequence[str | None], names: Sequence[str]) -> None:
    if not dataset.class_names or dataset.target != "classification":
        return
    labels = np.array(dataset.class_names)[dataset.labels.numpy()]
    if not set(labels.tolist()) & set(names):
        shown = f"{printable(labels[0], 60)}, ...; its classes: {printable(', '.join(names), 200)}"
        err.print(f"no label of the rows is a class of the model ({shown})", soft_wrap=True, highlight=False)
        return
    hits = sum(a == b for a, b in zip(predicted, labels.tolist(), strict=True))
    err.print(f"accuracy {hits / len(labels):.4f} on {len(labels)} labelled rows")


def _write(columns: Mapping[str, Sequence[Any]], target: Path | None, by: str) -> None:
    n = len(next(iter(columns.values())))
    if target is None:
        _write_csv(columns, sys.stdout)
        if by:
            err.print(f"{n} predictions{by}", soft_wrap=True, highlight=False)
        return
    if target.suffix.lower() == ".parquet":
        arrow, parquet = optional("pyarrow", "tables"), optional("pyarrow.parquet", "tables")
        with replacing(target) as temporary:
            parquet.write_table(arrow.table({name: list(column) for name, column in columns.items()}), temporary)
    else:
        with replacing(target) as temporary, temporary.open("w", newline="") as stream:
            _write_csv(columns, stream)
    err.print(f"{n} predictions in {target}{by}", soft_wrap=True)


def _write_csv(columns: Mapping[str, Sequence[Any]], stream: Any) -> None:
    writer = csv.writer(stream)
    writer.writerow(columns)
    n_ids = next(i for i, name in enumerate(columns) if name.startswith("predicted"))  # an id is repeated as it is
    for row in zip(*columns.values(), strict=True):
        writer.writerow([*row[:n_ids], *map(_text, row[n_ids:])])


def _text(value: str | float | int | None) -> str:
    if value is None:
        return ""
    return f"{value:.6g}" if isinstance(value, float) else str(value)
