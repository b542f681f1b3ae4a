"""The opponents on the recipe of an independent implementation, over many draws of the partition, beside its numbers.

    python benchmarks/floor.py --data ../shared/data --out runs/floor --draws 10 --jobs 8

CIFAR-100 features over their rms, 100 clients, Dirichlet 0.1 as PFLlib deals it, batch 64, 200 rounds of 3 epochs:
FedAvg and FedAvg-FT (20 epochs) at rate 0.1, Ditto (lambda 1) at 0.03. It had 71.1, 88.0 and 86.7 % on one
draw of its own. Beside our draws stands the partition that others published (columns of the features file).
"""

from __future__ import annotations

import argparse
import multiprocessing
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import settings
import torch

from apfl.data.federation import Dataset
from apfl.experiments.record import Record
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import load_method

DRAWN = Protocol(n_clients=100, alpha=0.1)
PUBLISHED = Protocol("given", None, client_column="published_client", test_column="published_test")
METHODS = {
    "fedavg": {"lr": 0.1},
    "fedavg_ft": {"lr": 0.1, "finetune_epochs": 20},
    "ditto": {"lr": 0.03, "pull": 1.0},
}


@lru_cache(maxsize=1)
def dataset_of(folder: Path) -> Dataset:
    dataset = settings.load(folder, "cifar100")
    return replace(dataset, features=dataset.features / dataset.features.square().mean().sqrt())


def work(job: tuple[Path, Protocol, str, int, str]) -> Record:
    folder, protocol, name, seed, device = job
    torch.set_num_threads(1)
    dataset = dataset_of(folder)
    method = load_method(name, normalise="none", **METHODS[name])
    record, _ = run(name, method, federate(dataset, protocol, seed).to(device), dataset, protocol, seed)
    return record


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=settings.DATA, help="the folder with the features files")
    parser.add_argument("--out", type=Path, default=Path("runs/floor"))
    parser.add_argument("--draws", type=int, default=10)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    draws = [(PUBLISHED, seed) for seed in range(3)] + [(DRAWN, seed) for seed in range(given.draws)]
    todo = [(given.data, protocol, name, seed, given.device) for name in METHODS for protocol, seed in draws]
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool, (given.out / "floor.jsonl").open("w") as out:
        for record in pool.imap_unordered(work, todo):
            print(record.to_json(), file=out, flush=True)
            accuracies = (
                f"{100 * record.accuracy_client_mean:.2f} ({100 * record.accuracy_sample_mean:.2f} of all rows)"
            )
            print(record.partition, record.seed, record.method, accuracies, flush=True)


if __name__ == "__main__":
    main()
