"""The scikit-learn face of the method."""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Self

import numpy as np
import torch
from scipy.special import softmax
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted

from apfl.data.federation import Shard
from apfl.data.missing import refuse_missing
from apfl.errors import InputError
from apfl.maths.ridge import Statistics
from apfl.methods import load_method
from apfl.methods._estimator.client_rows import ALONE, no_clients, rows_by_name, scores_and_reasons, seed_of, tensor
from apfl.methods._estimator.files import Filed
from apfl.methods._estimator.fitted import ClassWeight, Fitted, Stream, begin, encode, is_text, plain
from apfl.methods._estimator.labels import FittedLabels, are_labels, fit_labels, label_scores
from apfl.methods._estimator.reading import by_client, mind, present, read, read_one
from apfl.methods.apfl import APFL
from apfl.models.landmark import LandmarkModel
from apfl.models.predict import HALF
from apfl.models.undecided import in_words

__all__ = ["APFLClassifier"]

TINY = float(np.finfo(np.float64).eps)  # probabilities of labels lie strictly between 0 and 1, as scikit-learn expects


class APFLClassifier(Filed, ClassifierMixin, BaseEstimator):  # type: ignore[misc]  # scikit-learn ships no types
    """One classifier for each client: a ridge shared by all, plus a private ridge on what it gets wrong locally.

    Minimises, over the shared primary stream G and each client's refinement stream P_k::

        |Y - Phi G|^2 + gamma |G|^2          over the rows of all clients, then
        |(Y_k - Phi_k G) - Psi_k P_k|^2 + beta |P_k|^2    over the client's own,

    and scores a row of client k by Phi G + balance * Psi P_k.

    Parameters
    ----------
    d_primary, d_refinement : int or "auto"
        The number of landmarks, of which both streams share one map; with ``map="random"`` the widths of two maps.
        ``auto`` follows the number of rows at the first fit.
    gamma, beta : float or "auto"
        Ridges of the primary and of the refinement stream. ``auto`` chooses gamma by generalised cross-validation, and
        beta, balance and tau by how many left-out rows they get right.
    balance : float or "auto"
        Weight of the refinement stream (the paper's lambda); 0 leaves the primary alone.
    tau : float or "auto"
        Weight of the local prior, log(p_k / p) of the labels; 0 leaves it out.
    weight : float from 0 to 1 or "auto"
        Weight of the primary, in the scores and in the residual that the refinement is fitted to; 0 is going alone.
        ``auto`` takes 1, or 0 for a client if clearly more of its own left-out rows are right then (for all, if that
        holds over all clients). With ``map="random"`` it is 1.
    scope : {"federation", "client"}
        Whose left-out rows choose: everyone's, or the client's own.
    refinement : {"in-sample"}
        The residuals that the refinement is fitted to, as in the paper; there is no other choice.
    activations : str or pair of str
        Activation of both random maps, or of the primary and of the refinement map.
    normalise : {"auto", "root", "row", "columns", "centred", "standardise", "none"}
        How features are scaled first. ``auto`` chooses by a pilot on the first rows, with ``map="random"`` by the
        moments of the features. They are those of the first fit and stay fixed, as do those of ``columns``,
        ``centred`` and ``standardise``.
    intercept : bool
        Append a column of ones to both random maps.
    map : {"landmarks", "random"}
        One map of ``d_primary`` landmarks for both streams, without activations and intercept, or two random maps.
    landmarks : {"federation", "free"} or path
        Whose moments landmarks are drawn from: those of the rows of the first fit, nobody's, or those of a file of
        public features. They stay when clients join and leave.
    class_weight : "balanced", dict or None
        What a row of each class weighs, in both ridges and when left-out rows choose. ``balanced`` lets all classes
        weigh the same over all clients, so that rare ones are found; a dict has weights above 0 by label, 1 for others.
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
        Seed of the landmarks, or of the random maps.

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

    _fitted: Fitted
    _labels: FittedLabels  # in its place, if rows have several labels

    def __init__(
        self,
        d_primary: int | str = APFL.d_primary,
        d_refinement: int | str = APFL.d_refinement,
        gamma: float | str = APFL.gamma,
        beta: float | str = APFL.beta,
        balance: float | str = APFL.balance,
        tau: float | str = APFL.tau,
        weight: float | str = APFL.weight,
        scope: str = APFL.scope,
        refinement: str = APFL.refinement,
        activations: str | tuple[str, str] = APFL.activation_primary,
        normalise: str = APFL.normalise,
        intercept: bool = APFL.intercept,
        map: str = APFL.map,
        landmarks: str = APFL.landmarks,
        class_weight: Any = None,
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
        self.weight = weight
        self.scope = scope
        self.refinement = refinement
        self.activations = activations
        self.normalise = normalise
        self.intercept = intercept
        self.map = map
        self.landmarks = landmarks
        self.class_weight = class_weight
        self.keep_rows = keep_rows
        self.client_column = client_column
        self.unknown = unknown
        self.random_state = random_state

    # ------------------------------------------------------------------------------------------------ fitting

    def fit(self, X: Any, y: Any, clients: Any = None, groups: Any = None, sample_weight: Any = None) -> Self:
        """Fit from scratch.

        ``clients`` names the client of each row, or of all rows; without it, and without ``client_column``, there is
        one client. Rows with the same entry in ``groups`` (a patient, say) are left out together where left-out scores
        are used. A missing label, client or group (None, NaN, NaT, NA or an empty string) is refused.

        ``sample_weight`` (n,) weighs the rows in both ridges: with given maps and settings, 2 is a row given twice, and
        0 is always a row that is absent. A left-out row counts once, whatever it weighs, when settings are chosen.

        If ``y`` is an indicator matrix (n, c) of 0 and 1, a row may have several labels. Then models and weights of
        rows are those of `APFLRegressor`, ``predict`` gives indicators, and clients join and leave by fitting anew.
        """
        with self._all_or_nothing():
            self.__dict__.pop("_labels", None)
            if are_labels(y):
                return self._fit_labels(X, y, clients, groups, sample_weight)
            X, y, names = read(self, X, clients, y, reset=True)
            check_classification_targets(y)
            X, y, names, groups, weights = present(sample_weight, X, y, names, groups)
            return self._begin(np.unique(y), X, y, names, groups, weights)

    def _fit_labels(self, X: Any, y: Any, clients: Any, groups: Any, sample_weight: Any) -> Self:
        if self.class_weight is not None:
            raise InputError(
                f"class_weight={self.class_weight!r} given with several labels: all labels of a row share its weight; "
                "leave it out (thresholds find rare labels), or give sample_weight"
            )
        asked = self._method().numbers("multilabel")
        self._labels = fit_labels(self, asked, X, y, clients, groups, sample_weight)
        self.__dict__.pop("_fitted", None)
        return self

    def partial_fit(
        self,
        X: Any,
        y: Any,
        classes: Any = None,
        clients: Any = None,
        groups: Any = None,
        sample_weight: Any = None,
    ) -> Self:
        """Add rows, of clients already there or of new ones; with the same maps, the result equals fitting all at once.

        The first call fixes the classes (``classes``, or those of ``y``), the widths if they are ``auto``, and the
        normalisation: which one if it is ``auto``, and the moments of ``standardise`` and ``columns``. Every call
        chooses gamma, beta, balance and tau anew if they are ``auto``, from all rows so far, as `fit` would. So give
        the widths and ``normalise="row"``, ``"root"`` or ``"none"`` for exactly the result of `fit`, and with landmarks
        ``landmarks="free"`` too.
        """
        if are_labels(y) or hasattr(self, "_labels"):
            raise _whole()
        with self._all_or_nothing():
            first = not hasattr(self, "_fitted")
            if not first:
                self._check_sums()
            X, y, names = read(self, X, clients, y, reset=first)
            check_classification_targets(y)
            X, y, names, groups, weights = present(sample_weight, X, y, names, groups)
            if first:
                return self._begin(np.unique(y if classes is None else classes), X, y, names, groups, weights)
            return self._join(self._fitted, X, y, names, groups, weights)

    def add_client(self, client: Hashable, X: Any, y: Any, groups: Any = None, sample_weight: Any = None) -> Self:
        """Add a client with its rows: with the maps there are, exactly as if it had been there from the start.

        It may bring classes that nobody had. Clients whose rows were not kept do not name them until they `refit`.
        """
        self._check_sums()
        if client in self._fitted.models:
            raise InputError(f"client {client!r} is already there; use partial_fit to add rows, or remove it first")
        with self._all_or_nothing():
            X, y, names = read_one(self, client, X, y)
            check_classification_targets(y)
            X, y, names, groups, weights = present(sample_weight, X, y, names, groups)
            return self._join(self._fitted.with_classes_of(y), X, y, names, groups, weights)

    def remove_client(self, client: Hashable, X: Any = None, y: Any = None, sample_weight: Any = None) -> Self:
        """Take a client away: with the maps there are, exactly as if it had never been there.

        Its rows must be given if they were not kept. Widths that are ``auto`` stay what the first fit made them, and
        classes that only this client had stay too.
        """
        self._check_sums()
        if client not in self._fitted.models:
            raise InputError(no_clients([client], self.clients_))
        if len(self._fitted.models) == 1:
            raise InputError(f"client {client!r} is the only one; without it there is no model")
        given = None if client in self._fitted.rows else self._brought(client, X, y, sample_weight)
        with self._all_or_nothing():
            self._fitted = self._fitted.without(client, given, self._method())
            return self

    def refit(self, X: Any, y: Any, clients: Any = None, groups: Any = None, sample_weight: Any = None) -> Self:
        """Fit clients' refinements again, to the present primary, from rows that were not kept (all of them)."""
        self._check_sums()
        X, y, names = read(self, X, clients, y)
        X, y, names, groups, weights = present(sample_weight, X, y, names, groups)
        given = dict(by_client(self._fitted.classes, X, y, names, groups, weights))
        for client, rows in given.items():
            if client not in self._fitted.models:
                raise InputError(f"{no_clients([client], self.clients_)}; use add_client for a new one")
            self._check_same(client, rows)
        with self._all_or_nothing():
            self._fitted = self._fitted.published(self._method(), given)
            return self

    # --------------------------------------------------------------------------------------------- predicting

    def decision_function(self, X: Any, clients: Any = None) -> np.ndarray:
        """Scores (n, c), or for two classes the difference (n,); of several labels, above 0 for those given.
        ``unknown`` says what a client not fitted gets."""
        if hasattr(self, "_labels"):
            return label_scores(self, self._labels, X, clients) - HALF
        scores = self._scores(X, clients)[0]
        return scores[:, 1] - scores[:, 0] if scores.shape[1] == 2 else scores

    def predict(self, X: Any, clients: Any = None) -> np.ndarray:
        """The class of the highest score; of several labels, indicators (n, c)."""
        if hasattr(self, "_labels"):
            return (label_scores(self, self._labels, X, clients) > HALF).astype(int)
        scores, _ = self._scores(X, clients)
        return np.asarray(self.classes_[scores.argmax(1)])

    def predict_proba(self, X: Any, clients: Any = None) -> np.ndarray:
        """softmax(scores / T), with T chosen by the log-loss of left-out scores when the model was fitted.

        Of several labels, the scores between 0 and 1, (n, c): in the right order, but not calibrated.
        """
        if hasattr(self, "_labels"):
            return label_scores(self, self._labels, X, clients).clip(TINY, 1 - TINY)
        scores, temperatures = self._scores(X, clients)
        return np.asarray(softmax(scores / temperatures[:, None], axis=1))

    def score(self, X: Any, y: Any, clients: Any = None, sample_weight: Any = None) -> float:
        """Accuracy over the given rows."""
        refuse_missing("labels", y)
        return float(accuracy_score(y, self.predict(X, clients), sample_weight=sample_weight))

    def model(self, client: Hashable = ALONE) -> Any:
        """The model of one client, to save or deploy; of None, the primary stream that all clients share.

        A client that was not fitted is refused, unless ``unknown="shared"`` gives it the shared stream too.
        """
        check_is_fitted(self)
        if client is not None and self.unknown != "shared" and client not in self.clients_:
            raise InputError(f"{no_clients([client], self.clients_)} (model(None) is the shared stream)")
        names = {"feature_names": self._own_features()} if hasattr(self, "feature_names_in_") else {}
        if hasattr(self, "_labels"):
            return self._labels.model(client, names)
        found = self._model(client)
        return replace(found, class_names=[str(name) for name in self.classes_], about={**found.about, **names})

    @property
    def classes_(self) -> np.ndarray:
        if hasattr(self, "_labels"):
            return np.arange(self._labels.n_labels)
        return self._fitted.classes

    @property
    def clients_(self) -> list[Any]:
        return list(self._labels.models if hasattr(self, "_labels") else self._fitted.models)

    @property
    def primary_(self) -> np.ndarray:
        shared = self._model(None)
        if isinstance(shared, LandmarkModel):
            return shared.feature_map.unfold(shared.weights).numpy()
        return shared.primary.numpy()

    @property
    def statistics_(self) -> Statistics:
        if self._fitted.statistics is None:
            raise AttributeError("a classifier that was loaded from files has no statistics_")
        return self._fitted.statistics

    @property
    def chosen_(self) -> dict[str, Any]:
        return dict(self._labels.account if hasattr(self, "_labels") else self._fitted.account)

    def __sklearn_is_fitted__(self) -> bool:
        return hasattr(self, "_fitted") or hasattr(self, "_labels")

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags

    # ------------------------------------------------------------------------------------------------- within

    @contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """What fails leaves the estimator as it was."""
        before = dict(vars(self))
        try:
            yield
        except BaseException:
            self.__dict__.clear()
            self.__dict__.update(before)
            raise

    def _check_sums(self) -> None:
        """Refuse to add or remove rows if there are no sums to add them to."""
        check_is_fitted(self)
        if hasattr(self, "_labels"):
            raise _whole()
        if self._fitted.statistics is None:
            raise InputError(
                "this classifier was loaded from files, which have its models but no sums and no rows: nobody can join "
                "or leave. Fit it anew, or keep the fitted object with pickle"
            )

    def _begin(
        self, classes: np.ndarray, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any, weights: Any
    ) -> Self:
        """Fix classes, maps and normalisation by the first rows, and fit these."""
        activations = (self.activations,) * 2 if isinstance(self.activations, str) else self.activations
        method, new = self._method(), dict(by_client(classes, X, y, names, groups, weights))
        state = begin(classes, [*new.values()], method, activations, seed_of(self.random_state), self.keep_rows)
        self._fitted = replace(state, class_weight=self._class_weight(classes)).joined(new, method)
        return self

    def _join(
        self, state: Fitted, X: np.ndarray, y: np.ndarray, names: list[Hashable], groups: Any, weights: Any
    ) -> Self:
        """Add rows to the sums and to their clients, then publish."""
        new = dict(by_client(state.classes, X, y, names, groups, weights))
        self._fitted = state.joined(new, self._method())
        return self

    def _class_weight(self, classes: np.ndarray) -> ClassWeight:
        given = self.class_weight
        if given is None:
            return None
        if isinstance(given, str) and given == "balanced":
            return "balanced"
        if isinstance(given, Mapping) and all(_is_weight(weight) for weight in given.values()):
            strange = [label for label in given if isinstance(label, str) != is_text(classes)]
            if strange:
                raise InputError(
                    f"class_weight has the label {strange[0]!r}, but the classes are like {plain(classes[0])!r}: it "
                    "would weigh nothing; write labels as they are in y, text as text and numbers as numbers"
                )
            return given
        raise InputError(
            f"class_weight={given!r} given; allowed: None, 'balanced', or a dict of weights above 0 by label"
        )

    def _brought(self, client: Hashable, X: Any, y: Any, sample_weight: Any) -> Shard:
        """The rows of a client that were not kept, as they were when it joined."""
        if X is None or y is None:
            raise InputError(f"the rows of client {client!r} were not kept (keep_rows=False): give its X and y")
        X, y, _, _, weights = present(sample_weight, *read_one(self, client, X, y), None)
        own = None if weights is None else torch.from_numpy(weights)
        rows = Shard(tensor(X), encode(y, self._fitted.classes), None, weights=own)
        self._check_same(client, rows)
        return rows

    def _check_same(self, client: Hashable, rows: Shard) -> None:
        if not self._fitted.same_rows(client, rows):
            raise InputError(f"the rows given for client {client!r} are not those it joined with; give exactly those")

    def _method(self) -> APFL:
        """The settings as the method checks them."""
        names = "d_primary d_refinement gamma beta balance tau weight scope refinement normalise map landmarks"
        activations = (self.activations,) * 2 if isinstance(self.activations, str) else self.activations
        of_maps = dict(zip(("activation_primary", "activation_refinement"), activations, strict=True))
        method = load_method(
            "apfl", **{name: getattr(self, name) for name in (*names.split(), "intercept")}, **of_maps, bits=0
        )
        assert isinstance(method, APFL)
        return method

    def _model(self, client: Hashable) -> Stream:
        """The client's model, or the shared stream."""
        shared = self._fitted.shared
        assert shared is not None, "nothing is published before there are rows"
        return self._fitted.models.get(client, shared)

    def _own_features(self) -> list[str]:
        """The names of the features: of all columns but that of the clients."""
        names = [str(name) for name in self.feature_names_in_]
        if self.client_column is not None:
            names.pop(names.index(self.client_column) if isinstance(self.client_column, str) else self.client_column)
        return names

    def _scores(self, X: Any, clients: Any) -> tuple[np.ndarray, np.ndarray]:
        """Scores (n, c) and the temperature for each row (n,)."""
        check_is_fitted(self)
        X, _, names = read(self, X, clients)
        rows_of = rows_by_name(names)
        mind(self, [name for name in rows_of if name not in self._fitted.models])
        scores, temperatures = np.empty((len(X), len(self.classes_))), np.ones(len(X))
        reasons = torch.zeros(len(X), dtype=torch.int64)
        for name, rows in rows_of.items():
            model = self._model(name)
            scores[rows], reasons[rows] = scores_and_reasons(model, tensor(X[rows]))
            temperatures[rows] = model.temperature or 1.0
        if bool(reasons.any()):
            warnings.warn(f"{in_words(reasons)}; their scores are the local prior alone", stacklevel=3)
        return scores, temperatures


def _is_weight(given: Any) -> bool:
    try:
        return 0 < float(given) < np.inf
    except (TypeError, ValueError):
        return False


def _whole() -> InputError:
    return InputError(
        "a classifier of several labels is fitted whole: give all clients' rows to fit; .model() saves one"
    )
