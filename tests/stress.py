"""Small federations of every kind, to look for answers that are wrong without saying so.

A case is a dataset, a way to spread it over clients, and a *trouble* (duplicated rows, zero rows, collinear columns,
heavy tails, ...). `judge` fits the defaults and compares them with what anybody would try instead: `RidgeClassifierCV`
on the pooled rows and for each client alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from sklearn import datasets
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import RidgeClassifierCV

from apfl import APFLClassifier
from apfl.data import load_dataset
from apfl.data.federation import Shard
from apfl.federate import Site, Terms
from apfl.federate.inprocess import simulate
from apfl.methods import load_method
from apfl.models.file import Model, load_model

SHARED = Path(__file__).parents[2] / "shared" / "data"
FILES = {
    "cifar100": "cifar100-efficientnet-lite0.npz",
    "tinyimagenet": "tinyimagenet200-efficientnet-lite0.npz",
    "pacs": "pacs-efficientnet-lite0.npz",
}


@dataclass(frozen=True, eq=False)
class Rows:
    """Features, labels (0 to c - 1) and clients (0 to K - 1) of some rows."""

    x: np.ndarray  # (n, l)
    y: np.ndarray  # (n,)
    client: np.ndarray  # (n,)

    def __len__(self) -> int:
        return len(self.y)

    def pick(self, rows: np.ndarray) -> Rows:
        return Rows(self.x[rows], self.y[rows], self.client[rows])

    def plus(self, other: Rows) -> Rows:
        return Rows(*(np.concatenate(pair) for pair in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class Case:
    """One federation, drawn from its seed."""

    data: str
    n: int  # training rows
    n_features: int
    n_classes: int
    n_clients: int
    trouble: str
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.data} N={self.n} l={self.n_features} c={self.n_classes} K={self.n_clients} {self.trouble} "
            f"#{self.seed}"
        )


# ------------------------------------------------------------------------------------------------------- data


def _made(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    informative = max(2 if case.n_features > 1 else 1, min(case.n_features, 5 + case.n_classes))
    return datasets.make_classification(  # type: ignore[no-any-return]
        case.n + max(400, min(case.n, 4000)), case.n_features, n_informative=min(informative, case.n_features),
        n_redundant=0, n_classes=case.n_classes, n_clusters_per_class=1, class_sep=1.5,
        random_state=int(rng.integers(2**31)),
    )  # fmt: skip


def _of_scikit_learn(
    load: Callable[..., tuple[np.ndarray, np.ndarray]],
) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    def rows(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        x, y = load(return_X_y=True)
        keep = rng.permutation(len(y))[: case.n + max(case.n // 2, 40)]
        return x[keep].astype(float), y[keep]

    return rows


def _shared(name: str) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    def rows(case: Case, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        loaded = load_dataset(str(SHARED / FILES[name]))
        labels = loaded.labels.numpy()
        classes = rng.permutation(labels.max() + 1)[: case.n_classes]
        among = np.flatnonzero(np.isin(labels, classes))
        keep = rng.permutation(among)[: case.n + max(400, case.n // 2)]
        return loaded.features[keep].double().numpy(), np.searchsorted(np.sort(classes), labels[keep])

    return rows


DATA: dict[str, Callable[..., tuple[np.ndarray, np.ndarray]]] = {
    "made": _made,
    "digits": _of_scikit_learn(datasets.load_digits),
    "wine": _of_scikit_learn(datasets.load_wine),
    "breast_cancer": _of_scikit_learn(datasets.load_breast_cancer),
    **{name: _shared(name) for name in FILES},
}

# --------------------------------------------------------------------------------------------------- troubles


def _copies(rows: Rows, which: np.ndarray, clients: np.ndarray | None) -> Rows:
    """The rows with copies of some of them, at their own client or at others."""
    again = rows.pick(which)
    return rows.plus(again if clients is None else replace(again, client=clients))


def _columns(scale: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Callable[..., tuple[Rows, Rows]]:
    """A trouble of the columns strikes training and test rows alike."""

    def trouble(train: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
        both = scale(np.concatenate([train.x, test.x]), rng)
        return replace(train, x=both[: len(train)]), replace(test, x=both[len(train) :])

    return trouble


def _both(change: Callable[[Rows, np.random.Generator], Rows]) -> Callable[..., tuple[Rows, Rows]]:
    """A trouble of the rows that strikes training and test rows alike."""
    return lambda train, test, rng: (change(train, rng), change(test, rng))


def _rows(change: Callable[[Rows, np.random.Generator], Rows]) -> Callable[..., tuple[Rows, Rows]]:
    """A trouble of the training rows."""
    return lambda train, test, rng: (change(train, rng), test)


def _some(rows: Rows, share: float, rng: np.random.Generator) -> np.ndarray:
    return rng.permutation(len(rows))[: max(1, int(share * len(rows)))]


def _set_some(share: float, value: Callable[[np.ndarray, np.random.Generator], np.ndarray]) -> Callable[..., Rows]:
    def change(rows: Rows, rng: np.random.Generator) -> Rows:
        x, which = rows.x.copy(), _some(rows, share, rng)
        x[which] = value(x[which], rng)
        return replace(rows, x=x)

    return change


def _nearly_all_to_one(train: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    return tuple(  # type: ignore[return-value]
        replace(each, client=np.where(rng.random(len(each)) < 0.95, 0, each.client)) for each in (train, test)
    )


def _single_rows(train: Rows, test: Rows, rng: np.random.Generator) -> tuple[Rows, Rows]:
    """Half of the clients keep one training row each; the first gets the others."""
    client = train.client.copy()
    for k in range(1, client.max() + 1, 2):
        client[np.flatnonzero(client == k)[1:]] = 0
    return replace(train, client=client), test


EVERYWHERE = "every row at two clients"
TROUBLES: dict[str, Callable[[Rows, Rows, np.random.Generator], tuple[Rows, Rows]]] = {
    "none": lambda train, test, rng: (train, test),
    "one row twice": _rows(lambda r, g: _copies(r, g.integers(len(r), size=1), None)),
    "one row at two clients": _rows(
        lambda r, g: _copies(r, at := g.integers(len(r), size=1), (r.client[at] + 1) % (r.client.max() + 1))
    ),
    "a third twice": _rows(lambda r, g: _copies(r, _some(r, 1 / 3, g), None)),
    "a third at two clients": _rows(
        lambda r, g: _copies(r, at := _some(r, 1 / 3, g), (r.client[at] + 1) % (r.client.max() + 1))
    ),
    EVERYWHERE: _rows(lambda r, g: _copies(r, np.arange(len(r)), (r.client + 1) % (r.client.max() + 1))),
    "every row twice": _rows(lambda r, g: _copies(r, np.arange(len(r)), None)),
    "one row fifty times": _rows(lambda r, g: _copies(r, np.full(50, g.integers(len(r))), None)),
    "zero rows": _both(_set_some(0.05, lambda x, g: np.zeros_like(x))),
    "constant rows": _both(_set_some(0.05, lambda x, g: np.full_like(x, 3.0))),
    "zero columns": _columns(lambda x, g: x * (g.random(x.shape[1]) < 0.7)),
    "constant columns": _columns(lambda x, g: np.where(np.arange(x.shape[1]) % 4 == 3, 100.0, x)),
    "collinear columns": _columns(lambda x, g: np.concatenate([x, x[:, ::-1] * 2, x.sum(1, keepdims=True)], 1)),
    "columns of unlike scales": _columns(lambda x, g: x * 10 ** g.uniform(-3, 3, x.shape[1])),
    "columns of few values": _columns(lambda x, g: np.sign(x - np.median(x, 0))),
    "far from zero": _columns(lambda x, g: x + 1000.0),
    "heavy tails": _columns(lambda x, g: x * np.exp(g.standard_t(2, (len(x), 1)).clip(-8, 8))),
    "one client has nearly all": _nearly_all_to_one,
    "clients of one row": _single_rows,
}

# ------------------------------------------------------------------------------------------------------ cases


def cases(count: int, seed: int = 0, data: Collection[str] | None = None) -> list[Case]:
    """``count`` cases that go round the data and the troubles; those of the shared features only if they are there."""
    rng = np.random.default_rng(seed)
    here = [name for name in DATA if name not in FILES or (SHARED / FILES[name]).is_file()] if data is None else data
    weights = {"made": 4}
    kinds = [name for name in here for _ in range(weights.get(name, 1))]
    troubles = [name for name in TROUBLES if name != EVERYWHERE]
    found = []
    for i in range(count):
        data = kinds[i % len(kinds)]
        n, features, classes = _size(data, rng)
        clients = int(min(50, max(2, np.exp(rng.uniform(np.log(2), np.log(max(3, n / 8)))))))
        found.append(
            Case(data, n, features, classes, clients, troubles[(i * 7 + i // len(troubles)) % len(troubles)], i)
        )
    return found


def doubled(some: list[Case]) -> list[Case]:
    """Every tenth case with each of its rows at a second client too, whatever else it was to suffer from."""
    return [replace(case, trouble=EVERYWHERE) for case in some[::10]]


def _size(data: str, rng: np.random.Generator) -> tuple[int, int, int]:
    """Rows, features, classes."""
    n = int(np.exp(rng.uniform(np.log(20), np.log(20_000))))
    if data == "made":
        features = min(int(np.exp(rng.uniform(np.log(2), np.log(3000)))), int(4e6 / n))  # seconds, not minutes
        most = min(100, 2 ** min(features, 7), max(2, n // 5))
        return n, max(features, 2), int(np.exp(rng.uniform(np.log(2), np.log(most + 0.5))))
    if data == "digits":
        return min(n, 1300), 64, 10
    if data == "wine":
        return min(n, 120), 13, 3
    if data == "breast_cancer":
        return min(n, 400), 30, 2
    c = {"cifar100": 100, "tinyimagenet": 200, "pacs": 7}[data]
    n = min(n, 6000)
    return n, 1280, int(min(c, max(2, n // 10), np.exp(rng.uniform(np.log(2), np.log(c + 0.5)))))


def draw(case: Case) -> tuple[Rows, Rows]:
    """Training and test rows. Clients differ in their labels (Dirichlet 0.5), and some have one class alone."""
    rng = np.random.default_rng((case.seed, case.n))
    x, y = DATA[case.data](case, rng)
    classes = np.unique(y[: case.n])
    keep = np.isin(y, classes)
    x, y = x[keep], np.searchsorted(classes, y[keep])
    shares = rng.dirichlet(np.full(case.n_clients, 0.5), size=len(classes))
    client = np.array([rng.choice(case.n_clients, p=shares[label]) for label in y])
    rows = Rows(x, y, client)
    train, test = rows.pick(np.arange(case.n) if case.n < len(rows) else np.arange(len(rows) // 2)), rows
    test = rows.pick(np.arange(len(train), len(rows)))
    train, test = TROUBLES[case.trouble](train, test, rng)
    return known(train, test)


def known(train: Rows, test: Rows) -> tuple[Rows, Rows]:
    """Clients numbered anew, without those that have no training row."""
    names = np.unique(train.client)
    test = test.pick(np.isin(test.client, names))
    return tuple(replace(each, client=np.searchsorted(names, each.client)) for each in (train, test))  # type: ignore[return-value]


def shards(rows: Rows, n_clients: int) -> list[Shard]:
    x, y = torch.from_numpy(rows.x.astype(np.float32)), torch.from_numpy(rows.y)
    return [Shard(x[rows.client == k], y[rows.client == k]) for k in range(n_clients)]


# ------------------------------------------------------------------------------------------------------- judge


ERRORS = 3.5  # 400 cases pass 3 by chance once or twice, and clients of ten rows lose a tenth of them to each left out


@dataclass(frozen=True)
class Verdict:
    """What the default reached, and what ridge regression does with the same rows."""

    accuracy: float  # over all test rows, each with its client's model
    left_out: float | None  # what the record states; None if it says that it could not be judged
    pooled: float  # RidgeClassifierCV on all rows
    alone: float  # RidgeClassifierCV for each client
    below: float  # accuracy below the better of the two, 0 or more
    below_error: float  # its standard error, by the distinct training rows or the test rows, whichever are fewer
    left_out_error: float  # standard error of left_out - accuracy
    normalise: str
    n_test: int
    n_train: int

    @property
    def good(self) -> bool:
        return self.below <= max(0.05, 2 * self.below_error)

    @property
    def honest(self) -> bool:
        return self.left_out is None or abs(self.left_out - self.accuracy) <= ERRORS * self.left_out_error


def hits_of_apfl(train: Rows, test: Rows) -> tuple[np.ndarray, dict[str, object]]:
    """Which test rows the defaults get right, and what they chose."""
    n_clients, n_classes = _counts(train)
    (only,) = load_method("apfl").rounds(shards(train, n_clients), n_classes, 0)
    return _hits(only.models, test), dict(only.chosen)


def hits_of_random(train: Rows, test: Rows) -> tuple[np.ndarray, dict[str, object]]:
    """The same with two random maps, in float64."""
    n_clients, n_classes = _counts(train)
    (only,) = load_method("apfl", map="random").rounds(shards(train, n_clients), n_classes, 0)
    return _hits(only.models, test), dict(only.chosen)


def hits_of_estimator(train: Rows, test: Rows) -> tuple[np.ndarray, dict[str, object]]:
    """The same through `APFLClassifier`."""
    model = APFLClassifier().fit(train.x, train.y, clients=train.client)
    return model.predict(test.x, clients=test.client) == test.y, dict(model.chosen_)


def hits_of_federation(train: Rows, test: Rows, folder: Path) -> np.ndarray:
    """The same through the messages of a federation between machines, and the model files that come of them."""
    n_clients, n_classes = _counts(train)
    names = tuple(f"class-{c:03d}" for c in range(n_classes))
    sites = [Site(folder / "sites", f"site-{k}", own, names) for k, own in enumerate(shards(train, n_clients))]
    made = simulate(sites, Terms("stress", names, min_per_class=1, quorum=n_clients), folder / "server")
    return _hits([load_model(path) for path in made.models], test)


def _counts(train: Rows) -> tuple[int, int]:
    """Clients and classes; `draw` leaves no test row of others."""
    return int(train.client.max()) + 1, int(train.y.max()) + 1


def _hits(models: Sequence[Model], test: Rows) -> np.ndarray:
    right = np.zeros(len(test), dtype=bool)
    for k, model in enumerate(models):
        own = test.client == k
        scores = model.scores(torch.from_numpy(test.x[own].astype(np.float32)))
        assert bool(torch.isfinite(scores).all()), "scores that are not finite"
        right[own] = scores.argmax(1).numpy() == test.y[own]
    return right


def hits_of_ridge(train: Rows, test: Rows) -> np.ndarray:
    if len(np.unique(train.y)) == 1:
        return test.y == train.y[0]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", (RuntimeWarning, ConvergenceWarning, UserWarning))  # type: ignore[arg-type]
        model = RidgeClassifierCV(alphas=np.logspace(-3, 3, 7)).fit(train.x, train.y)
    return np.asarray(model.predict(test.x) == test.y)


def judge(
    train: Rows, test: Rows, hits_of: Callable[[Rows, Rows], tuple[np.ndarray, dict[str, object]]] = hits_of_apfl
) -> Verdict:
    right, chosen = hits_of(train, test)
    pooled = hits_of_ridge(train, test)
    alone = np.zeros(len(test), dtype=bool)
    for k in np.unique(test.client):
        own = test.client == k
        alone[own] = hits_of_ridge(train.pick(train.client == k), test.pick(own))
    better = max((pooled, alone), key=lambda hits: hits.mean())
    difference = better.astype(float) - right
    n_train = len(np.unique(train.x, axis=0))
    left_out, n_left_out = chosen["left_out_accuracy"], int(chosen["left_out_rows"])  # type: ignore[call-overload]
    error = 0.0
    if left_out is not None:
        error = float(np.hypot(_error(left_out * n_left_out, n_left_out), _error(right.sum(), len(test))))  # type: ignore[operator]
    return Verdict(
        float(right.mean()), left_out, float(pooled.mean()), float(alone.mean()),  # type: ignore[arg-type]
        max(0.0, float(difference.mean())), float(difference.std() / np.sqrt(min(len(test), n_train))), error,
        str(chosen.get("normalise", "")), len(test), n_train,
    )  # fmt: skip


def _error(hits: float, n: int) -> float:
    """Standard error of a share; one hit and one miss are added, as all right or all wrong is no certainty."""
    share = (hits + 1) / (n + 2)
    return float(np.sqrt(share * (1 - share) / (n + 2)))


def judged(some: list[Case]) -> Iterator[tuple[Case, Verdict]]:
    for case in some:
        yield case, judge(*draw(case))
