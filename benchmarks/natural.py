"""Natural clients and features of many kinds: is the default right, and does anybody lose by taking part?

    python benchmarks/natural.py --seeds 0 1 2 --out runs/natural.jsonl
    python benchmarks/natural.py --show runs/natural.jsonl

Clients are made by a column, by clusters, by who wrote, wore or treated (generated stand-ins of the schemas of FEMNIST,
HAR and heart disease, with shifts between clients), or are the domains of PACS. Features are as they are, rotated,
standardised or badly scaled. `apfl` runs with everything automatic, on each of its normalisations, and on another
kernel (with --brief neither); beside it every client alone, with its own left-out choice (`local_ridge`). A quarter of
each client's rows is for testing, half in small sets. The same command goes on with what the file lacks.

Draws of test rows overlap, so more of them do not make a set larger. The error of a gain is therefore that of its
rows: a client's gain is the mean over rows of what each gains over the draws that it is tested in, as if rows were
drawn anew.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import settings
import torch
from sklearn.cluster import KMeans
from sklearn.datasets import load_breast_cancer, load_diabetes, load_digits, load_iris, load_wine

from apfl.data.federation import Shard
from apfl.experiments.run import versions
from apfl.maths import landmarks
from apfl.maths.pilot import CANDIDATES
from apfl.methods import Round, load_method

Floats = np.ndarray
ENOUGH = 100  # test rows of a client that is judged by itself
AUTOMATIC = {"map": "landmarks", "weight": "auto"}
ALONE = {"gamma": "auto", "normalise": "auto"}


class Rows(NamedTuple):
    """Features (n, l), labels and whose they are; and the share of each client's rows to test on."""

    features: Floats
    labels: np.ndarray
    clients: np.ndarray
    test: float = 0.25


# ------------------------------------------------------------------------------------------------------ whose rows


def by_column(features: Floats, n: int) -> np.ndarray:
    """Quantiles of the column that varies most, on standardised columns: of the first principal direction."""
    centred = (features - features.mean(0)) / (features.std(0) + 1e-9)
    direction = np.linalg.svd(centred, full_matrices=False)[2][0]
    place = centred @ direction
    return np.searchsorted(np.quantile(place, np.linspace(0, 1, n + 1)[1:-1]), place)


def by_cluster(features: Floats, n: int) -> np.ndarray:
    scaled = (features - features.mean(0)) / (features.std(0) + 1e-9)
    return KMeans(n, n_init=3, random_state=0).fit_predict(scaled)


def sklearn_set(load: Callable[[], Any], split: Callable[[Floats, int], np.ndarray], n: int, test: float) -> Rows:
    bunch = load()
    features, target = bunch.data.astype(np.float64), bunch.target
    if target.dtype.kind == "f":  # diabetes: low, middle, high
        target = np.searchsorted(np.quantile(target, [1 / 3, 2 / 3]), target)
    return Rows(features, target.astype(np.int64), split(features, n), test)


def heart_like(seed: int = 0) -> Rows:
    """Four hospitals of the sizes of FLamby's heart disease, with other patients, other devices and other labels."""
    rng = np.random.default_rng((seed, 1))
    rows, labels, clients = [], [], []
    slopes = rng.normal(size=13)
    for k, (n, share) in enumerate(((303, 0.46), (261, 0.38), (200, 0.75), (300, 0.6))):
        ill = rng.random(n) < share
        own = slopes + 0.3 * rng.normal(size=13)  # what the illness does differs a little
        values = rng.normal(size=(n, 13)) + 0.55 * np.outer(ill - 0.5, own) + 0.4 * rng.normal(size=13)
        values[:, 5:] = values[:, 5:] > np.quantile(values[:, 5:], 0.6, axis=0)  # findings, yes or no
        values[:, :5] = values[:, :5] * [9, 18, 50, 23, 1] + [54, 131, 246, 149, 1]
        rows.append(values)
        labels.append(ill)
        clients += [k] * n
    return Rows(np.concatenate(rows), np.concatenate(labels).astype(np.int64), np.array(clients), 0.5)


def har_like(seed: int = 0, n_users: int = 20) -> Rows:
    """Six activities, 43 columns; a user wears the phone in an own way (offset, gain) and moves in an own way."""
    rng = np.random.default_rng((seed, 2))
    centres, common = rng.normal(size=(6, 43)), rng.normal(size=(43, 43)) / 7
    rows, labels, clients = [], [], []
    for k in range(n_users):
        n = int(rng.choice([150, 250, 440]))
        y = rng.choice(6, n, p=rng.dirichlet([5] * 6))
        own = centres + 0.45 * rng.normal(size=(6, 43))
        values = own[y] + (rng.normal(size=(n, 43)) @ common) * 2 + 0.8 * rng.normal(size=(n, 43))
        rows.append(values * rng.lognormal(0, 0.2, 43) + 0.5 * rng.normal(size=43))
        labels.append(y)
        clients += [k] * n
    return Rows(np.concatenate(rows), np.concatenate(labels), np.array(clients))


def femnist_like(seed: int = 0) -> Rows:
    """Digits by eight writers, each with an own slant, pressure and shift of the pen, and own favourite digits."""
    rng, bunch = np.random.default_rng((seed, 3)), load_digits()
    writers = rng.integers(0, 8, len(bunch.target))
    images = np.empty_like(bunch.images)
    for k in range(8):
        slant, pressure, down = rng.choice([-1, 0, 1]), rng.uniform(0.6, 1.5), rng.choice([-1, 0, 1])
        drawn = np.roll(bunch.images[writers == k], down, axis=1)
        drawn[:, :4] = np.roll(drawn[:, :4], slant, axis=2)
        images[writers == k] = np.clip(drawn * pressure, 0, 16)
    return Rows(images.reshape(len(images), -1), bunch.target.astype(np.int64), writers, 0.5)


def toy_like(seed: int = 0) -> Rows:
    """A table of a few hundred rows at three sites, one of them small, as people try things out with."""
    rng = np.random.default_rng((seed, 4))
    sizes = (200, 200, 28)
    clients = np.repeat(np.arange(3), sizes)
    features = rng.normal(size=(sum(sizes), 6)) * [1, 10, 0.1, 1, 5, 1] + rng.normal(size=(3, 6))[clients]
    scores = features / [1, 10, 0.1, 1, 5, 1] @ rng.normal(size=(6, 3)) + rng.normal(size=(sum(sizes), 3))
    return Rows(features, scores.argmax(1), clients)


def shared(data: str, change: str, folder: Path) -> Rows:
    """3,000 rows of the shared features: PACS by domain, or twenty classes of CIFAR-100 by cluster."""
    dataset, rng = settings.load(folder, data), np.random.default_rng(5)
    labels = np.asarray(dataset.labels)
    allowed = np.arange(len(labels)) if data == "pacs" else np.flatnonzero(labels < 20)
    chosen = np.sort(rng.permutation(allowed)[:3000])
    features = np.asarray(dataset.features, dtype=np.float64)[chosen]
    own = np.asarray(dataset.columns["domains"])[chosen] if data == "pacs" else by_cluster(features, 6)
    return Rows(CHANGES[change](features), labels[chosen], np.unique(own, return_inverse=True)[1])


def rotated(features: Floats) -> Floats:
    turned: Floats = features @ np.linalg.qr(np.random.default_rng(6).normal(size=(features.shape[1],) * 2))[0]
    return turned


CHANGES: Mapping[str, Callable[[Floats], Floats]] = {
    "as it is": lambda z: z,
    "rotated": rotated,
    "standardised": lambda z: (z - z.mean(0)) / (z.std(0) + 1e-9),
    "badly scaled": lambda z: z * 10 ** np.random.default_rng(7).uniform(-2, 2, z.shape[1]),
}


def sets(folder: Path) -> dict[str, Callable[[], Rows]]:
    """All of them, by name."""
    small: dict[str, tuple[Callable[[], Any], int, float]] = {
        "digits": (load_digits, 6, 0.25),
        "wine": (load_wine, 2, 0.5),
        "breast_cancer": (load_breast_cancer, 2, 0.5),
        "iris": (load_iris, 2, 0.5),
        "diabetes": (load_diabetes, 2, 0.5),
    }
    found: dict[str, Callable[[], Rows]] = {}
    for name, (load, n, test) in small.items():
        for how, split in (("column", by_column), ("cluster", by_cluster)):
            found[f"{name}, by {how}"] = partial(sklearn_set, load, split, n, test)
    found |= {"heart-like": heart_like, "har-like": har_like, "femnist-like": femnist_like, "toy table": toy_like}
    for data in ("pacs", "cifar100"):
        for change in CHANGES:
            found[f"{data}, {change}"] = partial(shared, data, change, folder)
    return found


# ------------------------------------------------------------------------------------------------------------ runs


def places(rows: Rows, seed: int) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Where each client's training and test rows are."""
    rng, halves = np.random.default_rng((seed, 8)), ([], [])  # type: ignore[var-annotated]
    for k in np.unique(rows.clients):
        own = rng.permutation(np.flatnonzero(rows.clients == k))
        cut = max(1, round(len(own) * (1 - rows.test)))
        for part, where in zip(halves, (own[:cut], own[cut:]), strict=True):
            part.append(where)
    return halves


def dealt(rows: Rows, seed: int) -> tuple[list[Shard], list[Shard]]:
    """Each client's rows as training and test shards."""
    train, test = (
        [Shard(torch.from_numpy(rows.features[own]).float(), torch.from_numpy(rows.labels[own])) for own in half]
        for half in places(rows, seed)
    )
    return train, test


@contextmanager
def exponential(scale: float = 1.0) -> Iterator[None]:
    """exp((cos t - 1) / scale) in place of the arc-cosine kernel."""
    usual = landmarks._arc_cosine

    def kernel(cosine: torch.Tensor) -> None:
        cosine.clamp_(-1, 1).sub_(1).div_(scale).exp_()

    landmarks._arc_cosine = kernel
    try:
        yield
    finally:
        landmarks._arc_cosine = usual


def last_round(name: str, given: Mapping[str, Any], train: Sequence[Shard], c: int, seed: int) -> Round:
    (*_, last) = load_method(name, **given).rounds(train, c, seed)
    return last


def right(last: Round, test: Sequence[Shard]) -> list[np.ndarray]:
    """For each client which of its test rows are right."""
    return [
        (model.scores(shard.features).argmax(1) == shard.labels).numpy()
        for model, shard in zip(last.models, test, strict=True)
    ]


def row_of(name: str, rows: Rows, seed: int, given: Mapping[str, Any], *, brief: bool = False) -> dict[str, Any]:
    """One draw of test rows: the default and going alone; unless it is ``brief``, the alternatives and the kernel."""
    train, test = dealt(rows, seed)
    c, start = int(rows.labels.max()) + 1, time.perf_counter()
    default = last_round("apfl", {**AUTOMATIC, **given}, train, c, seed)
    seconds = time.perf_counter() - start
    hits, alone = right(default, test), right(last_round("local_ridge", ALONE, train, c, seed), test)
    weights = default.chosen.get("weight_per_client") or [default.chosen.get("weight", 1.0)] * len(train)
    return {
        "set": name, "seed": seed, "settings": dict(given), "n_clients": len(train), "accuracy": share(hits),
        "normalise": default.chosen["normalise"], "pilot": default.chosen["pilot"]["hits"], "alone": share(alone),
        "chosen": {k: default.chosen.get(k) for k in ("beta", "balance", "tau", "gamma")},
        **({} if brief else _alternatives(default, hits, train, test, given, c, seed)),
        "clients": [
            {
                "n_train": len(own), "n_test": len(there), "right": int(a.sum()), "alone": int(b.sum()),
                "only_together": int((a & ~b).sum()), "only_alone": int((b & ~a).sum()), "weight": weight,
                "tested": where.tolist(), "gained": where[a & ~b].tolist(), "lost": where[b & ~a].tolist(),
            }
            for own, there, where, a, b, weight in zip(
                train, test, places(rows, seed)[1], hits, alone, weights, strict=True
            )
        ],
        "seconds": round(seconds, 2), "versions": versions(),
    }  # fmt: skip


def _alternatives(
    default: Round, hits: Sequence[np.ndarray], train: Sequence[Shard], test: Sequence[Shard],
    given: Mapping[str, Any], c: int, seed: int,
) -> dict[str, Any]:  # fmt: skip
    """On each normalisation by itself, and with the other kernel."""
    accuracy = {how: share(right(_normalised(how, given, train, c, seed), test)) for how in CANDIDATES}
    with exponential():
        other = _normalised(default.chosen["normalise"], given, train, c, seed)
        other_hits = right(other, test)
    return {
        "by_normalise": accuracy,
        "kernels": {
            "arc-cosine": [share(hits), _most_hits(default)],
            "exponential": [share(other_hits), _most_hits(other)],
        },
    }


def _normalised(how: str, given: Mapping[str, Any], train: Sequence[Shard], c: int, seed: int) -> Round:
    return last_round("apfl", {**AUTOMATIC, **given, "normalise": how}, train, c, seed)


def share(hits: Sequence[np.ndarray]) -> float:
    return round(float(np.concatenate(hits).mean()), 5)


def _most_hits(last: Round) -> float:
    """Left-out rows that the chosen settings get right."""
    return round(float(np.max(last.chosen["table"]["hits"])), 1)


# --------------------------------------------------------------------------------------------------------- reading


def client_gain(client: Mapping[str, Any]) -> tuple[float, float]:
    """Gain over going alone and its standard error, of the paired difference, both in points."""
    gained, lost, n = client["only_together"], client["only_alone"], client["n_test"]
    variance = max(gained + lost - (gained - lost) ** 2 / n, 1.0)
    return 100 * (gained - lost) / n, 100 * math.sqrt(variance) / n


class Gain(NamedTuple):
    """Over going alone, in points, with the error of the rows."""

    points: float
    error: float
    n_rows: float  # a draw

    @property
    def errors(self) -> float:
        return self.points / self.error


def gains_of_clients(draws: Sequence[Mapping[str, Any]]) -> list[Gain]:
    """What each client of a set gains over all draws, rows counted once each."""
    return [_gain([row["clients"][k] for row in draws]) for k in range(draws[0]["n_clients"])]


def _gain(of_draws: Sequence[Mapping[str, Any]]) -> Gain:
    """A ratio of sums over rows: of their gains, and of how often they are tested."""
    tested, gained = Counter(), Counter()  # type: ignore[var-annotated]
    for own in of_draws:
        tested.update(own["tested"])
        gained.update(own["gained"])
        gained.subtract(own["lost"])
    n = sum(tested.values())
    points = sum(gained.values()) / n
    variance = sum((gained[row] - points * times) ** 2 for row, times in tested.items())
    least = (n / len(tested)) ** 2  # one row that is always judged otherwise
    return Gain(100 * points, 100 * math.sqrt(max(variance, least)) / n, n / len(of_draws))


def mean_gain(gains: Sequence[Gain]) -> Gain:
    """Over clients, each of which counts alike."""
    error = math.sqrt(sum(gain.error**2 for gain in gains)) / len(gains)
    return Gain(float(np.mean([gain.points for gain in gains])), error, sum(gain.n_rows for gain in gains))


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """What clients gain, of draws that say which rows were tested; then the alternatives, where they were tried."""
    if counted := [row for row in rows if "tested" in row["clients"][0]]:
        show_gains(counted)
        print()
    if whole := [row for row in rows if "kernels" in row]:
        show_alternatives(whole)


def show_gains(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each set: means over its draws; then what clients gain over all sets."""
    print("| set | draws | apfl | alone | mean client gains | clients with 100 test rows | worst of them, in errors | "
          "alone by choice |")  # fmt: skip
    print("| --- " * 8 + "|")
    by_set = {name: [row for row in rows if row["set"] == name] for name in dict.fromkeys(row["set"] for row in rows)}
    found = {name: gains_of_clients(own) for name, own in by_set.items()}
    for name, own in by_set.items():
        ours, alone = (np.mean([100 * row[key] for row in own]) for key in ("accuracy", "alone"))
        clients, gain = [client for row in own for client in row["clients"]], mean_gain(found[name])
        judged = [each.errors for each in found[name] if each.n_rows >= ENOUGH]
        worst = f"{min(judged):.1f}" if judged else "–"
        print(
            f"| {name} | {len(own)} | {ours:.1f} | {alone:.1f} | {gain.points:+.1f} ± {gain.error:.1f} | {len(judged)} "
            f"| {worst} | {sum(client['weight'] == 0 for client in clients)} of {len(clients)} |"
        )
    everyone = [gain for own in found.values() for gain in own]
    total, of_sets = mean_gain(everyone), mean_gain([mean_gain(own) for own in found.values()])
    singly = [client_gain(c) for row in rows for c in row["clients"] if c["n_test"] >= ENOUGH]
    print(
        f"\nover {len(everyone)} clients {total.points:+.2f} ± {total.error:.2f}, over {len(found)} sets "
        f"{of_sets.points:+.2f} ± {of_sets.error:.2f}; draw by draw {len(singly)} clients with {ENOUGH} test rows, "
        f"{sum(gain < -2 * error for gain, error in singly)} below by more than two errors, "
        f"the worst by {-min((gain / error for gain, error in singly), default=math.nan):.1f}"
    )


def show_alternatives(rows: Sequence[Mapping[str, Any]]) -> None:
    """A line for each set: what other normalisations and the other kernel would give."""
    print("| set | draws | apfl | normalisation | best of its alternatives | below it | other kernel |")
    print("| --- " * 7 + "|")
    for name in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == name]
        mean = {how: np.mean([100 * row["by_normalise"][how] for row in own]) for how in CANDIDATES}
        ours, best = np.mean([100 * row["accuracy"] for row in own]), max(mean, key=lambda how: mean[how])
        chosen = [row["normalise"] for row in own]
        told = ", ".join(f"{how} ({chosen.count(how)})" for how in dict.fromkeys(chosen))
        test, left_out = (
            np.mean([row["kernels"]["exponential"][i] - row["kernels"]["arc-cosine"][i] for row in own]) for i in (0, 1)
        )
        print(
            f"| {name} | {len(own)} | {ours:.1f} | {told} | {best} {mean[best]:.1f} | {mean[best] - ours:.1f} | "
            f"{100 * test:+.1f} ({left_out:+.1f} left-out rows) |"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=[""], help="sets, by beginning")
    parser.add_argument("--data", type=Path, default=settings.DATA, help="folder of the shared features")
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of apfl")
    parser.add_argument("--brief", action="store_true", help="the default and going alone, nothing else")
    parser.add_argument("--out", type=Path, default=Path("runs/natural.jsonl"))
    parser.add_argument("--show", type=Path, help="only print the table of this file")
    given = parser.parse_args()
    if given.show:
        show([json.loads(line) for line in given.show.read_text().splitlines()])
        return
    chosen = dict(text.split("=", 1) for text in given.set)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(row["set"], row["seed"], json.dumps(row["settings"])) for row in done}
    for name, make in sets(given.data).items():
        if not name.startswith(tuple(given.only)):
            continue
        for seed in given.seeds:
            if (name, seed, json.dumps(chosen)) in known:
                continue
            row = row_of(name, make(), seed, chosen, brief=given.brief)
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(
                name,
                seed,
                row["normalise"],
                row["accuracy"],
                row["alone"],
                row["seconds"],
                flush=True,
            )


if __name__ == "__main__":
    main()
