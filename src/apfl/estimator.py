"""The scikit-learn face of the method."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from scipy.optimize import minimize_scalar
from scipy.special import logsumexp, softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils import check_array, check_random_state, check_X_y
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, validate_data
from torch import Tensor

from apfl.data.client_rows import (
    ALONE,
    client_names,
    digest,
    group_code,
    no_clients,
    one_each,
    rows_by_name,
    scores_and_reasons,
    take_out,
    tensor,
)
from apfl.data.federation import Shard
from apfl.data.missing import missing, refuse_missing
from apfl.errors import InputError
from apfl.maths.leaveout import leaving, with_copies
from apfl.maths.machine import over_clients
from apfl.maths.normalise import check_features, moments, normaliser
from apfl.maths.personalise import Primary, Rows, personalise, solve_primary
from apfl.maths.ridge import Statistics, one_hot, statistics, total
from apfl.methods import load_method
from apfl.methods._analytic import stream_maps
from apfl.methods.apfl import APFL
from apfl.models.dual_stream import DualStream
from apfl.models.undecided import in_words

__all__ = ["APFLClassifier"]


class APFLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """One classifier for each client: a ridge shared by all, plus a private ridge on what it gets wrong locally.

    Minimises, over the shared primary stream G and each client's refinement stream P_k::

        |Y - Phi G|^2 + gamma |G|^2          over the rows of all clients, then
        |(Y_k - Phi_k G) - Psi_k P_k|^2 + beta |P_k|^2    over the client's own,

    and scores a row of client k by Phi G + balance * Psi P_k.

    Parameters
    ----------
    d_primary, d_refinement : int or "auto"
        Widths of the two random feature maps. ``auto`` follows the number of rows at the first fit.
    gamma, beta : float or "auto"
        Ridges of the primary and of the refinement stream. ``auto`` chooses gamma by generalised cross-validation, and
        beta, balance and tau by how many left-out rows they get right.
    balance : float or "auto"
        Weight of the refinement stream (the paper's lambda); 0 leaves the primary alone.
    tau : float or "auto"
        Weight of the local prior, log(p_k / p) of the labels; 0 leaves it out.
    scope : {"federation", "client"}
        Whose left-out rows choose: everyone's, or the client's own.
    refinement : {"in-sample"}
        The residuals that the refinement is fitted to, as in the paper; there is no other choice.
    activations : str or pair of str
        Activation of both maps, or of the primary and of the refinement map.
    normalise : {"auto", "root", "row", "columns", "standardise", "none"}
        How features are scaled first. ``auto`` chooses by the moments of the features; they are those of the first fit
        and stay fixed, as do those of ``columns`` and ``standardise``.
    intercept : bool
        Append a column of ones to both maps.
    keep_rows : bool
        Keep every client's rows, so that clients can be added, extended and removed and all others refitted. Without
        them a client that is removed must bring its rows, and the others keep their model until they `refit`.
    client_column : int, str or None
        The column of X that names the client, by index or, in a DataFrame, by name. It is not a feature. This way all
        of scikit-learn sees the client without metadata routing: `cross_val_score`, `GridSearchCV`,
        `CalibratedClassifierCV` and so on. Otherwise name the clients in each call with ``clients=``: one for each
        row, or a single one for all rows.
    unknown : {"warn", "error", "shared"}
        What to do with rows to predict whose client was not fitted or not named: give them the scores of the primary
        stream, which all clients share, with a warning (``warn``) or without (``shared``), or refuse them (``error``).
    random_state : int, RandomState or None
        Seed of the random maps.

    Attributes
    ----------
    classes_ : ndarray
    clients_ : list of the clients that have a model
    statistics_ : Statistics of the primary stream over all clients
    primary_ : ndarray (d_primary, c)
    chosen_ : dict, the settings that were chosen and the left-out accuracy they were chosen by

    Examples
    --------
    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> site = np.where(np.random.default_rng(0).random(len(y)) < 0.8, y % 2, 1 - y % 2)  # odd and even, mostly
    >>> clf = APFLClassifier(d_primary=256, d_refinement=256).fit(X[:1200], y[:1200], clients=site[:1200])
    >>> clf.score(X[1200:], y[1200:], clients=site[1200:]) > 0.9
    True
    >>> clf.remove_client(1).clients_  # exactly as if it had never been there
    [0]

    With the client as a column of X, a scorer that knows nothing of clients measures the personal models:

    >>> from sklearn.model_selection import cross_val_score
    >>> clf = APFLClassifier(d_primary=256, d_refinement=256, client_column=-1)
    >>> table = np.column_stack([X, site])
    >>> scores = cross_val_score(clf, table[:600], y[:600], scoring="balanced_accuracy", cv=3)
    >>> bool(scores.mean() > 0.85)
    True
    """

    classes_: np.ndarray
    statistics_: Statistics
    _primary_alone: DualStream

    def __init__(
        self,
        d_primary: int | str = APFL.d_primary,
        d_refinement: int | str = APFL.d_refinement,
        gamma: float | str = APFL.gamma,
        beta: float | str = APFL.beta,
        balance: float | str = APFL.balance,
        tau: float | str = APFL.tau,
        scope: str = APFL.scope,
        refinement: str = APFL.refinement,
        activations: str | tuple[str, str] = APFL.activation_primary,
        normalise: str = APFL.normalise,
        intercept: bool = APFL.intercept,
        keep_rows: bool = True,
        client_column: int | str | None = None,
        unknown: str = "warn",
        random_state: Any = 0,
    ) -> None:
        self.d_primary = d_primary
        self.d_refinement = d_refinement
        self.gamma = gamma
        self.beta = beta
        self.balance = balance
        self.tau = tau
        self.scope = scope
        self.refinement = refinement
        self.activations = activations
        self.normalise = normalise
        self.intercept = intercept
        self.keep_rows = keep_rows
        self.client_column = client_column
        self.unknown = unknown
        self.random_state = random_state

    # ------------------------------------------------------------------------------------------------ fitting

    def fit(self, X: Any, y: Any, clients: Any = None, groups: Any = None) -> Self:
        """Fit from scratch.

        ``clients`` names the client of each row, or of all rows; without it, and without ``client_column``, there is
        one client. Rows with the same entry in ``groups`` (a patient, say) are left out together where left-out scores
        are used. A missing label, client or group (None, NaN, NaT, NA or an empty string) is refused.
        """
        with self._all_or_nothing():
            X, y, names = self._read(X, clients, y, reset=True)
            check_classification_targets(y)
            return self._begin(X, np.unique(y))._join(X, y, names, groups)

    def partial_fit(self, X: Any, y: Any, classes: Any = None, clients: Any = None, groups: Any = None) -> Self:
        """Add rows, of clients already there or of new ones; with the same maps, the result equals fitting all at once.

        The first call fixes the classes (``classes``, or those of ``y``), the widths where they are ``auto``, and
        the normalisation where it is ``standardise``.
        """
        with self._all_or_nothing():
            first = not hasattr(self, "statistics_")
            X, y, names = self._read(X, clients, y, reset=first)
            check_classification_targets(y)
            if first:
                self._begin(X, np.unique(y) if classes is None else np.unique(classes))
            return self._join(X, y, names, groups)

    def add_client(self, client: Hashable, X: Any, y: Any, groups: Any = None) -> Self:
        """Add a client with its rows: with the maps there are, exactly as if it had been there from the start."""
        check_is_fitted(self)
        if client in self._models:
            raise InputError(f"client {client!r} is already there; use partial_fit to add rows, or remove it first")
        with self._all_or_nothing():
            return self._join(*self._read_one(client, X, y), groups)

    def remove_client(self, client: Hashable, X: Any = None, y: Any = None) -> Self:
        """Take a client away: with the maps there are, exactly as if it had never been there.

        Its rows must be given if they were not kept. Widths that are ``auto`` stay what the first fit made them.
        """
        check_is_fitted(self)
        if client not in self._models:
            raise InputError(no_clients([client], self.clients_))
        if len(self._models) == 1:
            raise InputError(f"client {client!r} is the only one; without it there is no model")
        rows = self._rows.get(client)
        if rows is None:
            if X is None or y is None:
                raise InputError(f"the rows of client {client!r} were not kept (keep_rows=False): give its X and y")
            X, y, _ = self._read_one(client, X, y)
            rows = Shard(tensor(X), self._encode(y), None)
            if digest(rows) != self._digests[client]:
                raise InputError(
                    f"the rows given for client {client!r} are not those it joined with; give exactly those"
                )
        with self._all_or_nothing():
            self.statistics_ = self.statistics_ - self._statistics(rows)
            for kept in (self._models, self._rows, self._digests):
                kept.pop(client, None)
            return self._publish()

    def refit(self, X: Any, y: Any, clients: Any = None, groups: Any = None) -> Self:
        """Fit clients' refinements again, to the present primary, from rows that were not kept (all of them)."""
        check_is_fitted(self)
        X, y, names = self._read(X, clients, y)
        given = dict(self._by_client(X, y, names, groups))
        for client, rows in given.items():
            if client not in self._models:
                raise InputError(f"{no_clients([client], self.clients_)}; use add_client for a new one")
            if client in self._digests and digest(rows) != self._digests[client]:
                raise InputError(
                    f"the rows given for client {client!r} are not those it joined with; give exactly those"
                )
        with self._all_or_nothing():
            return self._publish(given)

    # --------------------------------------------------------------------------------------------- predicting

    def decision_function(self, X: Any, clients: Any = None) -> np.ndarray:
        """Scores (n, c), or for two classes the difference (n,). ``unknown`` says what a client not fitted gets."""
        scores = self._scores(X, clients)[0]
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any, clients: Any = None) -> np.ndarray:
        """The class of the highest score."""
        scores, _ = self._scores(X, clients)
        return np.asarray(self.classes_[scores.argmax(1)])

    def predict_proba(self, X: Any, clients: Any = None) -> np.ndarray:
        """softmax(scores / T), with T chosen by the log-loss of left-out scores when the model was fitted."""
        scores, temperatures = self._scores(X, clients)
        return np.asarray(softmax(scores / temperatures[:, None], axis=1))

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Accuracy over the given rows."""
        refuse_missing("labels", y)
        return float(accuracy_score(y, self.predict(X, clients), sample_weight=sample_weight))

    def model(self, client: Hashable = ALONE) -> DualStream:
        """The model of one client, to save or deploy; of None, the primary stream that all clients share.

        A client that was not fitted is refused, unless ``unknown="shared"`` gives it the shared stream too.
        """
        check_is_fitted(self)
        if client is not None and self.unknown != "shared" and client not in self._models:
            raise InputError(f"{no_clients([client], self.clients_)} (model(None) is the shared stream)")
        found: DualStream = self._models.get(client, self._primary_alone)
        return replace(found, class_names=[str(name) for name in self.classes_])

    @property
    def clients_(self) -> list[Any]:
        return list(self._models)

    @property
    def primary_(self) -> np.ndarray:
        return self._primary_alone.primary.numpy()

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_primary_alone")

    # ------------------------------------------------------------------------------------------------- within

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What fails leaves the estimator as it was."""
        before = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self).items()}
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _read(
        self, X: Any, clients: Any, y: Any = "no_validation", reset: bool = False
    ) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
        """Features, labels and the client of each row, checked; without ``y``, the labels are empty."""
        if self.unknown not in ("warn", "error", "shared"):
            raise InputError(f"unknown={self.unknown!r} is not allowed; use 'warn', 'error' or 'shared'")
        labelled = y is not None and not isinstance(y, str)
        if labelled and hasattr(y, "__len__"):  # a single value is refused below
            refuse_missing("labels", y)
        if self.client_column is None:
            out = validate_data(self, X, y, dtype=np.float64, reset=reset)
        elif clients is not None:
            raise InputError(f"clients= given, and client_column={self.client_column!r} in the constructor; use one")
        else:
            validate_data(self, X, y, skip_check_array=True, reset=reset)  # counts and names the columns of X as given
            X, clients = take_out(self.client_column, X)
            checks = {"dtype": np.float64, "estimator": self}
            out = check_X_y(X, y, **checks) if labelled else check_array(X, input_name="X", **checks)
        X, y = out if labelled else (out, np.empty(0))
        return X, y, [ALONE] * len(X) if clients is None else client_names(clients, len(X))

    def _read_one(self, client: Hashable, X: Any, y: Any) -> tuple[np.ndarray, np.ndarray, list[Hashable]]:
        """The rows of one client, whose column, if there is one, says the same."""
        if missing([client])[0]:
            raise InputError(f"{client!r} cannot name a client; give a string or number")
        X, y, names = self._read(X, None, y)
        if self.client_column is None:
            names = [client] * len(y)
        if others := [name for name in names if name != client]:
            raise InputError(f"client_column={self.client_column!r} names {others[0]!r} in the rows of {client!r}")
        return X, y, names

    def _mind(self, strange: list[Hashable]) -> None:
        """Warn of, or refuse, rows whose clients have no model, so that the shared stream never answers unnoticed."""
        if not strange or self.unknown == "shared":
            return
        problem = no_clients(strange, self.clients_)
        if self.unknown == "error":
            raise InputError(f"{problem} (unknown='error')")
        warnings.warn(
            f"{problem}. The shared stream answers for these rows. Name fitted clients (clients=, or client_column= in "
            "the constructor), or set unknown='shared' if this is intended.",
            stacklevel=4,  # the caller of predict and its like
        )

    def _begin(self, X: np.ndarray, classes: np.ndarray) -> Self:
        """Fix classes, maps and normalisation; forget all clients."""
        self._method()
        self.classes_ = classes
        activations = (self.activations,) * 2 if isinstance(self.activations, str) else self.activations
        if isinstance(self.random_state, (int, np.integer)):
            seed = int(self.random_state)
        else:
            seed = int(check_random_state(self.random_state).randint(2**31))
        self._normaliser = normaliser(self.normalise, moments(tensor(X)))
        widths = self._method().widths(*X.shape)
        self._maps = stream_maps(tensor(X[:1]), self._normaliser, widths, activations, seed, self.intercept)
        self._models: dict[Hashable, DualStream] = {}
        self._rows: dict[Hashable, Shard] = {}
        self._digests: dict[Hashable, str] = {}
        if hasattr(self, "statistics_"):
            del self.statistics_
        return self

    def _join(self, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any) -> Self:
        """Add rows to the statistics and to their clients, then publish."""
        self._method()  # refuses bad settings before anything changes
        check_features(self._normaliser.how, [tensor(X)])
        new = dict(self._by_client(X, y, names, groups))
        for client in new:
            if client in self._models and client not in self._rows:
                raise InputError(
                    f"client {client!r} is there already and its rows were not kept (keep_rows=False): "
                    "remove it and add it again with all its rows"
                )
        added = total(self._statistics(rows) for rows in new.values())
        self.statistics_ = self.statistics_ + added if hasattr(self, "statistics_") else added
        merged = {client: self._rows[client] + rows if client in self._rows else rows for client, rows in new.items()}
        if self.keep_rows:
            self._rows |= merged
        else:
            self._digests |= {client: digest(rows) for client, rows in merged.items()}
        return self._publish(merged)

    def _by_client(
        self, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any
    ) -> Iterator[tuple[Hashable, Shard]]:
        labels = self._encode(y)
        group_codes = None
        if groups is not None:
            # A group is known by its name, so that rows added later join it.
            group_codes = torch.tensor([group_code(group) for group in one_each("groups", groups, len(y))])
        for name, rows in rows_by_name(names).items():
            yield (
                name,
                Shard(tensor(X[rows]), labels[rows], None if group_codes is None else group_codes[rows]),
            )

    def _encode(self, y: np.ndarray) -> Tensor:
        index = np.searchsorted(self.classes_, y).clip(max=len(self.classes_) - 1)
        if not np.array_equal(self.classes_[index], y):
            strange = y[self.classes_[index] != y][0]
            raise InputError(
                f"label {strange!r} is not among the classes {list(self.classes_)}; all must be known at the start"
            )
        return torch.from_numpy(index)

    def _statistics(self, rows: Shard) -> Statistics:
        phi = self._maps[0](self._normaliser(rows.features))
        copies = leaving(rows.features, rows.labels, None).copies
        return with_copies(statistics(phi, one_hot(rows.labels, len(self.classes_))), rows.features, copies)

    def _method(self) -> APFL:
        """The settings as the method checks them."""
        names = ("d_primary", "d_refinement", "gamma", "beta", "balance", "tau", "scope", "refinement", "normalise")
        method = load_method("apfl", **{name: getattr(self, name) for name in names})
        assert isinstance(method, APFL)
        return method

    def _publish(self, given: dict[Hashable, Shard] | None = None) -> Self:
        """Solve the primary; refit every client whose rows are at hand; choose the temperatures."""
        method = self._method()
        primary = solve_primary(self.statistics_, method.gamma)
        at_hand = self._rows | (given or {})
        temperature = self._primary_alone.temperature if hasattr(self, "_primary_alone") else None
        if at_hand:
            temperature = self._fit_clients(at_hand, primary, method)
        self._primary_alone = DualStream(
            self._maps[0], primary.weights, normaliser=self._normaliser, temperature=temperature
        )
        return self

    def _fit_clients(self, at_hand: dict[Hashable, Shard], primary: Primary, method: APFL) -> float:
        """Models of these clients; returns the temperature of the primary alone."""
        clients = list(at_hand)

        def rows_of(k: int) -> Rows:
            rows = at_hand[clients[k]]
            z = self._normaliser(rows.features)
            together = leaving(rows.features, rows.labels, rows.groups)
            return Rows(self._maps[0](z), self._maps[1](z), rows.labels, *together)

        made = personalise(
            rows_of, len(clients), primary, method.choice, sketch_width=0, seed=0, over=over_clients, keep_scores=True
        )
        self.chosen_ = made.account
        labels = np.concatenate([at_hand[client].labels.numpy() for client in clients])
        pairs = list(zip(made.clients, made.scores, strict=True))
        temperature = _temperature(torch.cat([left.at(own.setting) for own, left in pairs]).numpy(), labels)
        for client, own in zip(clients, made.clients, strict=True):
            self._models[client] = DualStream(
                self._maps[0], primary.weights, self._maps[1], own.refinement, own.balance, self._normaliser,
                temperature=temperature, prior=own.prior,
            )  # fmt: skip
        return _temperature(torch.cat([left.alone for left in made.scores]).numpy(), labels)

    def _scores(self, X: Any, clients: Any) -> tuple[np.ndarray, np.ndarray]:
        """Scores (n, c) and the temperature for each row (n,)."""
        check_is_fitted(self)
        X, _, names = self._read(X, clients)
        rows_of = rows_by_name(names)
        self._mind([name for name in rows_of if name not in self._models])
        scores, temperatures = np.empty((len(X), len(self.classes_))), np.ones(len(X))
        reasons = torch.zeros(len(X), dtype=torch.int64)
        for name, rows in rows_of.items():
            model = self._models.get(name, self._primary_alone)
            scores[rows], reasons[rows] = scores_and_reasons(model, tensor(X[rows]))
            temperatures[rows] = model.temperature or 1.0
        if bool(reasons.any()):
            warnings.warn(f"{in_words(reasons)}; their scores are the local prior alone", stacklevel=3)
        return scores, temperatures


def _temperature(scores: np.ndarray, labels: np.ndarray) -> float:
    """argmin over T of the log-loss of softmax(scores / T)."""

    def loss(log_t: float) -> float:
        scaled = scores / np.exp(log_t)
        return float((logsumexp(scaled, axis=1) - scaled[np.arange(len(labels)), labels]).mean())

    return float(np.exp(minimize_scalar(loss, bounds=(-7.0, 3.0), method="bounded").x))
