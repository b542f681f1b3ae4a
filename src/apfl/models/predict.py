"""From rows in any form to predictions: tensors give indices, everything else gives the names of classes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, overload

import numpy as np
import torch
from torch import Tensor

from apfl.errors import InputError, not_finite, unknown
from apfl.maths.encoding import Encoding
from apfl.models.undecided import in_words, undecided

__all__ = ["HALF", "array_of", "features_of", "like", "numbers_of", "predicted", "rows_of"]

HALF = 0.5  # of several labels, a row is given those with a higher score


class _Scores(Protocol):
    @property
    def class_names(self) -> Sequence[str] | None: ...
    @property
    def about(self) -> Mapping[str, Any]: ...
    def scores(self, features: Any) -> Tensor: ...


@overload
def predicted(model: _Scores, rows: Tensor) -> Tensor: ...
@overload
def predicted(model: _Scores, rows: Any) -> Any: ...
def predicted(model: _Scores, rows: Any) -> Any:
    """The class of the highest score for each row.

    A tensor gives a tensor of indices, -1 if the row has no decision (see `apfl.models.undecided`). An array, a
    DataFrame or a list of rows gives an array: the names of the classes if the model knows them, '' without a decision,
    which is warned of; else the indices. A model that knows its features by name finds them in a DataFrame.
    A model of numbers gives them in the target's units, (n,) or (n, c); one of several labels 0 and 1, (n, c).
    """
    features = features_of(model, rows)
    scores = model.scores(features)
    target = model.about.get("target", "classification")
    if target != "classification":
        answer = numbers_of(model.about, scores) if target == "regression" else (scores > HALF).long()
        return answer if isinstance(rows, Tensor) else _flat(answer.cpu().numpy())
    reasons = undecided(model, features, scores)
    best = scores.argmax(1).masked_fill(reasons > 0, -1)
    if isinstance(rows, Tensor):
        return best
    if bool(reasons.any()):
        warnings.warn(in_words(reasons), stacklevel=3)
    indices = best.cpu().numpy()
    return indices if model.class_names is None else np.array([*model.class_names, ""])[indices]  # -1 is the last


def numbers_of(about: Mapping[str, Any], scores: Tensor) -> Tensor:
    """The scores of a model of numbers in the units of its targets, as its file states them; (n, c), float64."""
    mean, std = (about.get(f"target_{each}") for each in ("mean", "std"))
    if mean is None or std is None:
        return scores.double()
    return scores.double() * scores.new_tensor(std, dtype=torch.float64) + scores.new_tensor(mean, dtype=torch.float64)


def _flat(answer: np.ndarray) -> np.ndarray:
    """One column without a second dimension."""
    return answer[:, 0] if answer.shape[1] == 1 else answer


def features_of(model: _Scores, rows: Any) -> Tensor:
    """The model's features of these rows: a tensor as it is; of a DataFrame, the columns that the model names.

    A model that states an encoding makes them of the columns that it reads.
    """
    if isinstance(rows, Tensor):
        return rows
    stated = model.about.get("encoding")
    if stated is not None and hasattr(rows, "iloc") and any(isinstance(each, str) for each in rows.columns):
        columns = {str(name): rows[name].tolist() for name in rows.columns}
        return rows_of(Encoding.from_dict(stated).transform(columns))
    return rows_of(_own_columns(rows, model.about.get("feature_names")))


def like(rows: Any, answer: Tensor) -> Any:
    """A tensor for a tensor, an array for anything else."""
    return answer if isinstance(rows, Tensor) else answer.cpu().numpy()


def _own_columns(rows: Any, names: Sequence[str] | None) -> Any:
    """Of a DataFrame with named columns, the model's features in the model's order; anything else as it is."""
    if not names or not hasattr(rows, "iloc") or not any(isinstance(each, str) for each in rows.columns):
        return rows
    for name in names:
        if name not in rows.columns:
            raise unknown("column in the rows to predict", name, map(str, rows.columns))
    return rows[list(names)]


def array_of(values: Any) -> np.ndarray:
    """An array, a tensor (on any device), a list, or a column or table of pandas, as numpy."""
    if isinstance(values, Tensor):
        return np.asarray(values.detach().cpu().numpy())
    try:
        return np.asarray(values)
    except ValueError as error:
        raise InputError(
            f"{type(values).__name__} given that is no array ({error}); give rows of one length"
        ) from error


def rows_of(rows: Any) -> Tensor:
    """Rows of features (n, l) as a tensor: a tensor as it is; an array, a DataFrame or a list as float32, checked."""
    if isinstance(rows, Tensor):
        return rows
    array = array_of(rows)
    if array.ndim != 2 or array.dtype.kind not in "fiub":
        raise InputError(
            f"{type(rows).__name__} of {array.dtype} with shape {array.shape} given; expected numbers with shape "
            "(rows, features): several rows, without labels and other columns"
        )
    with np.errstate(over="ignore"):  # what is too large is infinite, and refused
        features = torch.from_numpy(array.astype(np.float32))
    if not bool(features.isfinite().all()):
        raise not_finite("the rows to predict")
    return features
