"""The federated encoding as a transformer of scikit-learn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from apfl.errors import InputError
from apfl.maths.encoding import MIN_CLIENTS, MIN_ROWS, settle, summarise

__all__ = ["Encoder"]


class Encoder(TransformerMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """Numbers for words, dates and gaps of a DataFrame, learnt from sums that clients add up.

    Parameters
    ----------
    categories : sequence of str
        Columns whose numbers are names.
    client_column : str or None
        The column that names the client. It stays as it is, in front, for ``APFLClassifier(client_column=0)``; without
        it all rows are one client's.
    min_rows, min_clients : int
        A category of fewer rows, or that fewer clients have, is one of the others. With one client, only rows count.

    Attributes
    ----------
    encoding_ : Encoding, which every client may have

    Examples
    --------
    >>> import pandas as pd
    >>> table = pd.DataFrame({"site": ["n", "n", "s", "s"], "age": [40, None, 60, 50], "blood": list("ABAB")})
    >>> Encoder(client_column="site", min_rows=2).fit(table).get_feature_names_out().tolist()
    ['site', 'age', 'age=(missing)', 'blood=A', 'blood=B']
    """

    def __init__(
        self,
        categories: Sequence[str] = (),
        client_column: str | None = None,
        min_rows: int = MIN_ROWS,
        min_clients: int = MIN_CLIENTS,
    ) -> None:
        self.categories = categories
        self.client_column = client_column
        self.min_rows = min_rows
        self.min_clients = min_clients

    def fit(self, X: Any, y: Any = None) -> Self:
        """Add up what the clients' columns say."""
        columns, clients = self._columns(X)
        names, place = np.unique(np.array([str(each) for each in clients]), return_inverse=True)
        parts = [np.flatnonzero(place == k) for k in range(len(names))]
        sums = (summarise({n: [c[row] for row in rows] for n, c in columns.items()}, self.categories) for rows in parts)
        self.encoding_ = settle(reduce(add, sums), min_rows=self.min_rows, min_clients=self.min_clients)
        self.feature_names_in_ = np.array([str(name) for name in X.columns], dtype=object)
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: Any) -> np.ndarray:
        """The features, with the client in front if it is a column."""
        check_is_fitted(self)
        columns, clients = self._columns(X)
        made = self.encoding_.transform(columns)
        if self.client_column is None:
            return made
        return np.column_stack([np.array(clients, dtype=object), made.astype(object)])

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The names of what `transform` gives."""
        check_is_fitted(self)
        first = [] if self.client_column is None else [self.client_column]
        return np.array([*first, *self.encoding_.feature_names], dtype=object)

    def _columns(self, X: Any) -> tuple[Mapping[str, list[Any]], list[Any]]:
        if not hasattr(X, "columns") or not len(X):
            raise InputError(f"{type(X).__name__} given; an Encoder needs a DataFrame with named columns and rows")
        columns = {str(name): X[name].tolist() for name in X.columns}
        if self.client_column is None:
            return columns, [0] * len(X)
        if self.client_column not in columns:
            raise InputError(f"no column '{self.client_column}' that names the client (have: {', '.join(columns)})")
        return columns, columns.pop(self.client_column)
