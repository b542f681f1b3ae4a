"""`APFLRegressor` beside the better of pooled and per-client `RidgeCV`: 13 sets, clients by a column or by cluster.

    python benchmarks/regression.py [--seeds 0 1 2] [--divisions 1] [--only friedman1] [--one-fold]

A number is the RMSE of `APFLRegressor` over that of the better of the two, over rows that are tested once each in four
folds (with --one-fold: over those of the first fold alone), behind it its standard error, from the rows. The better one
is known from the test rows only. Targets are standardised, so that several count alike. A client with fewer than three
rows takes the pooled ridge. With several --divisions into folds a row's error is the mean over these.
"""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Iterator

import numpy as np
from sklearn.cluster import KMeans
from sklearn.datasets import (
    load_diabetes,
    load_linnerud,
    make_friedman1,
    make_friedman2,
    make_friedman3,
    make_regression,
)
from sklearn.linear_model import RidgeCV
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from apfl import APFLRegressor

FOLDS, CLIENTS, ENOUGH = 4, 4, 1.01
LEAST = 1e-300  # of what is divided by
Errors = np.ndarray  # squared, of each row


def sets(seed: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    def linear(n: int, d: int, noise: float, **more: int) -> tuple[np.ndarray, np.ndarray]:
        made: tuple[np.ndarray, np.ndarray] = make_regression(n, d, noise=noise, random_state=seed, **more)
        return made

    return {
        "diabetes, 442 rows": load_diabetes(return_X_y=True),
        "linnerud, 20 rows": load_linnerud(return_X_y=True),
        "friedman1, 300": make_friedman1(300, noise=1.0, random_state=seed),
        "friedman1, 120": make_friedman1(120, noise=2.0, random_state=seed),
        "friedman2, 300": make_friedman2(300, noise=50.0, random_state=seed),
        "friedman2, 120": make_friedman2(120, noise=100.0, random_state=seed),
        "friedman3, 300": make_friedman3(300, noise=0.1, random_state=seed),
        "friedman3, 120": make_friedman3(120, noise=0.2, random_state=seed),
        "linear, 300 x 20": linear(300, 20, 10.0),
        "linear, noisy": linear(300, 20, 100.0),
        "linear, no noise": linear(300, 20, 0.0),
        "linear, 120 x 200": linear(120, 200, 10.0),
        "linear, two targets": linear(200, 10, 20.0, n_targets=2, effective_rank=5),
    }


def clients(features: np.ndarray, way: str, seed: int) -> np.ndarray:
    k = min(CLIENTS, len(features) // 10)
    if way == "column":
        return np.digitize(features[:, 0], np.quantile(features[:, 0], np.arange(1, k) / k))
    found: np.ndarray = KMeans(k, n_init=1, random_state=seed).fit_predict(StandardScaler().fit_transform(features))
    return found


def squares(found: np.ndarray, y: np.ndarray) -> Errors:
    return np.square(found.reshape(y.shape) - y).sum(1)


def ridge(X: np.ndarray, y: np.ndarray, train: np.ndarray, test: np.ndarray) -> Errors:
    model = make_pipeline(StandardScaler(), RidgeCV(np.logspace(-3, 3, 13))).fit(X[train], y[train])
    return squares(model.predict(X[test]), y[test])


def fold(X: np.ndarray, y: np.ndarray, site: np.ndarray, test: np.ndarray) -> Errors:
    """Of ours, the pooled and the per-client ridge, (3, test rows)."""
    model = APFLRegressor().fit(X[~test], y[~test], clients=site[~test])
    ours, alone = squares(model.predict(X[test], site[test]), y[test]), np.zeros(len(y))
    for client in np.unique(site[test]):
        own, where = ~test & (site == client), test & (site == client)
        alone[where] = ridge(X, y, own if own.sum() > 2 else ~test, where)
    return np.stack([ours, ridge(X, y, ~test, test), alone[test]])


def cases(seeds: list[int], folds: int, divisions: int, only: list[str]) -> Iterator[tuple[str, str, float, float]]:
    for seed in seeds:
        for name, (X, y) in sets(seed).items():
            if not name.startswith(tuple(only)):
                continue
            y = ((y - y.mean(0)) / y.std(0)).reshape(len(y), -1)
            rng = np.random.default_rng(seed)
            divided = [rng.permutation(len(y)) % FOLDS for _ in range(divisions)]
            for way in ("column", "cluster"):
                site = clients(X, way, seed)
                yield name, way, *ratio(np.mean([errors(X, y, site, places, folds) for places in divided], 0))


def errors(X: np.ndarray, y: np.ndarray, site: np.ndarray, places: np.ndarray, folds: int) -> Errors:
    """Of ours, the pooled and the per-client ridge, (3, rows), each row tested in its fold."""
    found = np.full((3, len(y)), np.nan)
    for place in range(folds):
        found[:, places == place] = fold(X, y, site, places == place)
    return found[:, ~np.isnan(found[0])]


def ratio(found: Errors) -> tuple[float, float]:
    """Our RMSE over that of the better of the two, and its standard error, from the spread of the rows."""
    ours, best = found[0], found[1:][found[1:].mean(1).argmin()]
    error = (ours / max(ours.mean(), LEAST) - best / max(best.mean(), LEAST)).std() / math.sqrt(len(ours))
    value = math.sqrt(ours.mean() / best.mean())
    return value, value * error / 2  # of a square root


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of sets, folds and clusters")
    parser.add_argument("--one-fold", action="store_true", help="test on the first fold alone")
    parser.add_argument("--divisions", type=int, default=1, help="of the rows into folds")
    parser.add_argument("--only", nargs="*", default=[""], help="sets, by beginning")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")  # of scikit-learn: R2 of one row
    found: dict[tuple[str, str], list[tuple[float, float]]] = {}
    folds = 1 if arguments.one_fold else FOLDS
    for name, way, *pair in cases(arguments.seeds, folds, arguments.divisions, arguments.only):
        found.setdefault((name, way), []).append((pair[0], pair[1]))
    print("| set | clients by column | by cluster |\n| --- | --- | --- |")
    for name in dict.fromkeys(name for name, _ in found):
        print(f"| {name} | {' | '.join(_cell(found[name, way]) for way in ('column', 'cluster'))} |")
    ratios = np.array([ratio for some in found.values() for ratio, _ in some])
    above = [(ratio, error) for some in found.values() for ratio, error in some if ratio > ENOUGH]
    clear = sum(ratio - ENOUGH > 2 * error for ratio, error in above)
    print(
        f"\nmedian {np.median(ratios):.2f}; above {ENOUGH} in {len(above)} of {len(ratios)}, "
        f"by more than two standard errors in {clear}"
    )


def _cell(ratios: list[tuple[float, float]]) -> str:
    return ", ".join(
        f"**{ratio:.3f}** ± {error:.3f}" if ratio > ENOUGH else f"{ratio:.3f} ± {error:.3f}" for ratio, error in ratios
    )


if __name__ == "__main__":
    main()
