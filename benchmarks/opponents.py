"""Every opponent, tuned on training rows, in every setting of the comparison: the records behind the docs' tables.

    python benchmarks/opponents.py --data ../shared/data --out runs/opponents --settings "cifar100, 50 clients" --jobs 8

200 rounds of 3 local epochs, three seeds. A method with something to tune is tuned once for each setting, on a part of
the *training* rows of seed 0. OUT/records.jsonl has a line for each run, OUT/tuning.jsonl every grid point; what they
hold already is not run again. --seconds begins nothing new after so long. Several processes share a GPU well: a round
of a small head is mostly launching kernels (start nvidia-cuda-mps-control -d first).
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path

import settings
import torch

from apfl.data.federation import Dataset, Federation
from apfl.experiments.record import Record, read_records
from apfl.experiments.run import Protocol, federate, run
from apfl.experiments.tuning import HELD_OUT, ROUNDS, tune
from apfl.methods import load_method, method_names
from apfl.methods._training import Training

WIDE = {"oll": 8192, "ridge_to_global": 8192}  # these references also at apfl's width
SLOW_FIRST = ("fedpcl", "fedselect", "ditto", "fedala")


@dataclass(frozen=True)
class Job:
    """One method in one setting: tuned, then run with every seed."""

    data: str
    protocol: Protocol
    method: str
    d: int | None
    given: argparse.Namespace
    deadline: float

    @property
    def where(self) -> str:
        return json.dumps([self.data, asdict(self.protocol), self.method, self.d, self.given.rounds])


@lru_cache(maxsize=1)
def dataset_of(folder: Path, data: str) -> Dataset:
    return settings.load(folder, data)


@lru_cache(maxsize=3)
def federation_of(folder: Path, data: str, protocol: Protocol, seed: int, device: str) -> Federation:
    return federate(dataset_of(folder, data), protocol, seed).to(device)


def work(job: Job) -> tuple[Job, dict, list[Record]]:
    """What tuning found, and the records that were missing; as far as time allows."""
    torch.set_num_threads(1)
    given = job.given
    if given.device != "cpu":  # at its limit a process gives back what it holds unused, which others cannot make it do
        torch.cuda.set_per_process_memory_fraction(0.9 / given.jobs)
    method = load_method(job.method, **({} if job.d is None else {"d": job.d}))
    if isinstance(method, Training):
        method = replace(method, n_rounds=given.rounds)
    tuned = known(given.out).get(job.where)
    records: list[Record] = []
    if time.time() > job.deadline:
        return job, {}, records
    if tuned is None:
        start, first = time.perf_counter(), federation_of(given.data, job.data, job.protocol, 0, given.device)
        found = tune(method, first.train, first.n_classes, 0)
        names = [name for name in (found.results[0] if found.results else {}) if name != "accuracy_client_mean"]
        chosen = {name: getattr(found.method, name) for name in names}
        tuned = {"where": job.where, "chosen": chosen, "results": found.results, "seconds": time.perf_counter() - start}
    method = replace(method, **tuned["chosen"])
    axes = {name: sorted({point[name] for point in tuned["results"]}) for name in tuned["chosen"]}
    how = {"seed": 0, "held_out": HELD_OUT, "rounds": min(given.rounds, ROUNDS), "axes": axes} if axes else {}
    done = {(r.data, Protocol(**r.protocol), r.method, json.dumps(r.settings), r.seed) for r in earlier(given.out)}
    for seed in given.seeds:
        dataset = dataset_of(given.data, job.data)
        key = (dataset.name, job.protocol, job.method, json.dumps(asdict(method)), seed)
        if key in done or time.time() > job.deadline:
            continue
        federation = federation_of(given.data, job.data, job.protocol, seed, given.device)
        record, _ = run(job.method, method, federation, dataset, job.protocol, seed)
        records.append(replace(record, tuning=how))
    return job, tuned, records


@lru_cache(maxsize=1)
def earlier(out: Path) -> list[Record]:
    return read_records(out / "records.jsonl")


@lru_cache(maxsize=1)
def known(out: Path) -> dict[str, dict]:
    path = out / "tuning.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return {found["where"]: found for found in map(json.loads, lines)}


def jobs(given: argparse.Namespace) -> Iterator[Job]:
    deadline = time.time() + given.seconds
    names = sorted(given.methods, key=lambda name: (name not in SLOW_FIRST, name))
    for data, protocol in settings.chosen(given.settings):
        for name in names:
            for d in (None, WIDE[name]) if name in WIDE else (None,):
                yield Job(data, protocol, name, d, given, deadline)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=settings.DATA, help="the folder with the features files")
    parser.add_argument("--out", type=Path, default=Path("runs/opponents"))
    parser.add_argument("--settings", nargs="+", default=["cifar100", "tiny", "pacs"], help="beginnings of their names")
    parser.add_argument("--methods", nargs="+", choices=method_names(), default=method_names(), metavar="METHOD")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--seconds", type=float, default=1e9)
    return parser.parse_args()


def main() -> None:
    given = options()
    given.out.mkdir(parents=True, exist_ok=True)
    waiting = list(jobs(given))
    with (
        multiprocessing.get_context("spawn").Pool(given.jobs) as pool,
        (given.out / "records.jsonl").open("a") as records,
        (given.out / "tuning.jsonl").open("a") as tuning,
    ):
        already = set(known(given.out))
        for n, (job, tuned, made) in enumerate(pool.imap_unordered(work, waiting), 1):
            if tuned and job.where not in already:
                print(json.dumps(tuned), file=tuning, flush=True)
            for record in made:
                print(record.to_json(), file=records, flush=True)
            accuracies = " ".join(f"{100 * r.accuracy_client_mean:.2f} ({r.seconds:.1f} s)" for r in made)
            width = "" if job.d is None else f" d={job.d}"
            chosen = tuned.get("chosen", "not done: out of time")
            where = settings.name_of(job.data, job.protocol)
            print(f"{n}/{len(waiting)}  {where}  {job.method}{width}  {accuracies}  {chosen}", flush=True)


if __name__ == "__main__":
    main()
