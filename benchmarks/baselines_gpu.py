"""All methods at the paper's settings on CIFAR-100 features, tuned: the records behind the table in the docs.

    python benchmarks/baselines_gpu.py ../shared/data/cifar100-efficientnet-lite0.npz --estimate
    python benchmarks/baselines_gpu.py ../shared/data/cifar100-efficientnet-lite0.npz --alphas 0.1 --out "$OUT"

50 clients, alpha 0.1, 0.5 and 1.0, seeds 0, 1 and 2. Every method with something to tune is tuned once for each alpha,
on training rows of seed 0. OUT/records.jsonl has a line as soon as a run is done, OUT/tuning.jsonl every grid point.
What --resume FOLDER already holds is copied and not run again; --seconds stops between two runs.

Needs no installed apfl; a missing library is named at once. Missing ones may lie in a folder .vendor beside src:

    pip install --target .vendor --python-version 3.12 --only-binary=:all: pydantic
    pip install --target .vendor --python-version 3.12 --only-binary=:all: --no-deps scikit-learn joblib narwhals ...
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import os
import shutil
import sys
import time
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src")]
sys.path += [str(ROOT / ".vendor")]  # last: the machine's own torch and numpy come first

missing = [
    name
    for name in ("torch", "numpy", "scipy", "sklearn", "threadpoolctl", "safetensors", "pydantic")
    if importlib.util.find_spec(name) is None
]
if missing:
    sys.exit(f"missing: {', '.join(missing)}; install them, or put them into {ROOT / '.vendor'}; see its docstring")


def version_or_checkout(name: str, known=importlib.metadata.version) -> str:
    try:
        return known(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


importlib.metadata.version = version_or_checkout  # apfl runs from its checkout here and has no version of its own

import torch  # noqa: E402

from apfl.data import load_dataset  # noqa: E402
from apfl.experiment import Protocol, federate, keep_record, read_records, run  # noqa: E402
from apfl.methods import load_method, method_names  # noqa: E402
from apfl.methods._training import Training  # noqa: E402
from apfl.tuning import tune_once  # noqa: E402


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("features", type=Path)
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/baselines")))
    parser.add_argument("--resume", type=Path, help="a folder with records.jsonl and tuning.jsonl to go on from")
    parser.add_argument("--methods", default=",".join(method_names()))
    parser.add_argument("--alphas", default="0.1,0.5,1.0")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no new run after so long")
    parser.add_argument("--no-tune", action="store_true")
    parser.add_argument("--estimate", action="store_true", help="a few rounds of each method, and what all would take")
    return parser.parse_args()


def chosen_methods(given: argparse.Namespace) -> dict:
    methods = {name: load_method(name) for name in given.methods.split(",")}
    return {n: replace(m, n_rounds=given.rounds) if isinstance(m, Training) else m for n, m in methods.items()}


def estimate(given: argparse.Namespace, dataset) -> None:
    """Three rounds of each method (the first one warms up), untuned; fine-tuning is left out."""
    federation = federate(dataset, Protocol(n_clients=given.clients, alpha=0.1), 0).to(given.device)
    total = 0.0
    for name, method in chosen_methods(given).items():
        times = [time.perf_counter()]
        for _ in method.rounds(federation.train, federation.n_classes, 0):
            if given.device != "cpu":
                torch.cuda.synchronize()
            times.append(time.perf_counter())
            if len(times) == 5:
                break
        per_round = (times[-1] - times[1]) / max(len(times) - 2, 1)
        whole = times[1] - times[0] + per_round * (given.rounds - 1 if len(times) > 2 else 0)
        total += whole
        print(f"{name:16s} {whole:8.1f} s a run", flush=True)
    print(f"{'one seed':16s} {total:8.1f} s; tuning an alpha takes about as long again", flush=True)


def main() -> None:
    given = options()
    began = time.monotonic()
    dataset = load_dataset(str(given.features))
    if given.estimate:
        return estimate(given, dataset)
    given.out.mkdir(parents=True, exist_ok=True)
    records = given.out / "records.jsonl"
    for name in ("records.jsonl", "tuning.jsonl"):
        if given.resume is not None and (given.resume / name).exists():
            shutil.copyfile(given.resume / name, given.out / name)
    for alpha in map(float, given.alphas.split(",")):
        protocol = Protocol(n_clients=given.clients, alpha=alpha)
        federations = {s: federate(dataset, protocol, s).to(given.device) for s in map(int, given.seeds.split(","))}
        tuning = federations.get(0) or federate(dataset, protocol, 0).to(given.device)
        for name, method in chosen_methods(given).items():
            start = time.monotonic()
            if start - began > given.seconds:
                return print("out of time; go on with --resume", flush=True)
            if not given.no_tune:
                where = [dataset.sha256, alpha, given.clients]
                method = tune_once(
                    given.out / "tuning.jsonl", name, method, tuning.train, tuning.n_classes, 0, where
                ).method
            tuned = time.monotonic() - start
            done = {(r.method, r.alpha, r.seed) for r in read_records(records)}
            for seed, federation in federations.items():
                if (name, alpha, seed) in done:
                    continue
                if time.monotonic() - began > given.seconds:
                    return print("out of time; go on with --resume", flush=True)
                record, _ = run(name, method, federation, dataset, protocol, seed)
                keep_record(record, records)
                print(
                    f"alpha {alpha:g}  {name:16s} seed {seed}  {100 * record.accuracy_client_mean:6.2f} %  "
                    f"{record.seconds:6.1f} s  (tuning {tuned:.1f} s)  {method}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
