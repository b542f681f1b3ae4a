"""The closed forms and the heads of one exchange on the twelve settings, tuned: records for `apfl table --pareto`.

    python benchmarks/pareto.py --device cuda --jobs 14 --seconds 570 --out runs/pareto
    python benchmarks/pareto.py --missing --out runs/pareto
    python benchmarks/pareto.py --join docs/results/records/pareto-twelve.jsonl --out runs/pareto
    python benchmarks/pareto.py --picture docs/results/pareto.svg

A job is one method on one setting. Its grid is judged on a fifth of the training rows of seed 0, as `apfl bench` does;
a shared head is tuned first, and what clients do with it (own labels, local prior, fine-tuning) on top of the tuned
head, so that all four share the head. A job writes its records when it is done; the same command goes on with those
that are left, and stops by itself after ``--seconds``. ``--join`` puts all records into one file, with those of the
gradient methods, which `experiments/auto-*.toml` made. ``--picture`` draws three of the settings from that file.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import settings
import torch
from threadpoolctl import threadpool_limits

from apfl.data.federation import Dataset, Federation
from apfl.experiments.record import Record, keep_record, read_records
from apfl.experiments.run import Protocol, federate, record_of, run
from apfl.experiments.tuning import HELD_OUT, NORMALISE, own_axes, tune
from apfl.files import replacing
from apfl.methods import Method, Round, load_method
from apfl.methods._head import GRIDS, Adapting
from apfl.report.figures.draw import figure
from apfl.report.figures.style import save
from apfl.report.results import results
from apfl.report.sheet import gather

RECORDS = Path(__file__).parents[1] / "docs" / "results" / "records"
TRAINED = ("fedavg", "fedavg_ft", "fedprox", "fedprox_ft", "ditto", "fedala", "feddbe", "fedas", "fedpcl", "fedselect",
           "local_head")  # fmt: skip
EARLIER = ("opponents.jsonl", "tinyimagenet.jsonl")  # which have the tuned gradient methods
SEEDS = (0, 1, 2)
Axes = Mapping[str, Sequence[Any]]


@dataclass(frozen=True)
class Entry:
    """A method with its settings; ``axes`` is its grid, None its own one, and an empty one nothing to tune."""

    name: str
    given: Mapping[str, Any]
    axes: Axes | None = None

    @property
    def label(self) -> str:
        return "-".join([self.name, *(str(value) for value in self.given.values())])


# In the order in which they are run: what is quick and matters most comes first.
ENTRIES = [
    Entry("apfl", {}, {}),
    Entry("apfl", {"d_primary": 8192}, {}),
    Entry("local_ridge", {"gamma": "auto", "normalise": "auto"}, {}),
    Entry("afl", {}),
    Entry("oll", {}),
    Entry("ridge_to_global", {}),
    Entry("apfl_paper", {}, {"normalise": NORMALISE, "beta": (10.0, 100.0, 1000.0), "balance": (0.3, 0.5, 0.7, 0.9)}),
    Entry("fedncm", {}),
    Entry("fedlda", {}),
    Entry("fedcgs", {}),
    Entry("fed3r", {}),
    Entry("fedcof", {}),
    Entry("gh_ofl", {"kind": "nb"}),
    Entry("deepafl", {}),
    Entry("safle", {}, {"normalise": ("columns", "row"), "gamma": (1.0, 10.0, 100.0), "groups": (128, 256)}),
    Entry("fedpft", {"components": 1, "batch": 256}, {"normalise": NORMALISE, "lr": (0.03, 0.1, 0.3, 1.0)}),
    Entry("gh_ofl", {"kind": "fishermix"}),
    Entry("ridge_to_global", {"map": "landmarks", "d": 4096}),
    Entry("apfl", {"map": "random"}, {}),
]


@dataclass(frozen=True)
class Job:
    """One method on one setting."""

    data: str
    protocol: Protocol
    entry: Entry

    @property
    def label(self) -> str:
        setting = settings.name_of(self.data, self.protocol).replace(", ", "-").replace(" ", "-")
        return f"{setting}--{self.entry.label}"


def records_of(job: Job, folder: Path, device: str, seeds: Sequence[int]) -> list[Record]:
    """Tune on the first seed, then run on all of them."""
    dataset = _loaded(folder, job.data)
    points = _tuned(job, _federation(job, dataset, 0, device))
    records = []
    for seed in seeds:
        federation, start = _federation(job, dataset, seed, device), time.perf_counter()
        methods = [method for method, _ in points]
        for place, last in methods[0].together(methods, federation.train, federation.n_classes, seed):
            method, axes = points[place]
            seconds = time.perf_counter() - start  # since the work began that the points share
            record = record_of(job.entry.name, method, last, federation, dataset, job.protocol, seed, seconds)
            tuning = {"seed": 0, "held_out": HELD_OUT, "rounds": 1, "axes": {k: list(v) for k, v in axes.items()}}
            records.append(_slim(replace(record, tuning=tuning if axes else {})))
    return records


def _tuned(job: Job, federation: Federation) -> list[tuple[Method, Axes]]:
    """The method with its tuned settings; of a shared head all that clients may do with it. With the axes of each."""
    first = load_method(job.entry.name, **job.entry.given)
    axes = own_axes(first) if job.entry.axes is None else job.entry.axes
    axes = {name: values for name, values in axes.items() if name not in job.entry.given}
    given = federation.train, federation.n_classes, 0
    best = tune(first, *given, axes=axes).method if axes else first
    if not isinstance(best, Adapting):
        return [(best, axes)]
    points = [(best, axes)]
    for adapt in ("labels", "prior", "finetune"):
        own = GRIDS.get(adapt, {})
        adapting = load_method(job.entry.name, **(vars(best) | {"adapt": adapt}))
        points.append((tune(adapting, *given, axes=own).method if own else adapting, {**axes, **own}))
    return points


def _slim(record: Record) -> Record:
    """Without what no comparison of means needs: 1,600 records are to stay below a few megabytes."""
    accuracies = [None if each is None else round(each, 4) for each in record.client_accuracies]
    return replace(
        record, client_accuracies=accuracies, recall_per_class=[], class_names=(), class_counts=(),
        primary_accuracies=(), client_names=[], curve=(), chosen=_kept(record.chosen),
    )  # fmt: skip


def _kept(chosen: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in chosen.items() if len(json.dumps(value)) < 400}


@cache
def _loaded(folder: Path, data: str) -> Dataset:
    return settings.load(folder, data)


def _federation(job: Job, dataset: Dataset, seed: int, device: str) -> Federation:
    return federate(dataset, job.protocol, seed).to(device)


def _work(jobs: Any, done: Any, folder: Path, out: Path, device: str, seeds: Sequence[int]) -> None:
    """A process: job after job until there are none."""
    torch.set_num_threads(1)
    threadpool_limits(1)
    while (job := jobs.get()) is not None:
        start = time.perf_counter()
        try:
            records = records_of(job, folder, device, seeds)
            with replacing(out / f"{job.label}.jsonl") as temporary:
                temporary.write_text("".join(f"{record.to_json()}\n" for record in records))
            best = max(record.accuracy_client_mean for record in records)
            done.put(f"{job.label}: {time.perf_counter() - start:.1f} s, at most {best:.4f}")
        except Exception as error:
            done.put(f"FAILED {job.label}: {type(error).__name__}: {error}")
        if device.startswith("cuda"):
            torch.cuda.empty_cache()


def run_all(todo: Sequence[Job], given: argparse.Namespace) -> None:
    """All jobs in as many processes, until the time is up."""
    context, until = multiprocessing.get_context("spawn"), time.monotonic() + given.seconds
    jobs, done = context.SimpleQueue(), context.Queue()
    for job in [*todo, *[None] * given.jobs]:
        jobs.put(job)
    fixed = (jobs, done, given.data, given.out, given.device, given.seeds)
    team = [context.Process(target=_work, args=fixed, daemon=True) for _ in range(min(given.jobs, len(todo)))]
    for process in team:
        process.start()
    left = len(todo)
    while left and time.monotonic() < until and any(process.is_alive() for process in team):
        try:
            print(done.get(timeout=1), flush=True)
            left -= 1
        except multiprocessing.queues.Empty:  # type: ignore[attr-defined]
            continue
    for process in team:
        process.terminate()
    print(f"{len(todo) - left} of {len(todo)} jobs done; the same command goes on with the others", flush=True)


def train_missing(given: argparse.Namespace) -> None:
    """Each seed that some gradient method lacks, from the record that its tuned seed left."""
    torch.set_float32_matmul_precision("medium" if given.products == "bfloat16" else "highest")
    earlier = [record for name in EARLIER for record in read_records(RECORDS / name) if record.method in TRAINED]
    for data, protocol in settings.chosen(given.only):
        here = [
            record for record in earlier
            if (record.data, Protocol(**record.protocol)) == (Path(settings.FILES[data]).name, protocol)
            and (given.methods is None or record.method in given.methods)
        ]  # fmt: skip
        for tuned in [record for record in here if record.seed == 0]:
            done = {record.seed for record in here if record.method == tuned.method}
            for seed in [seed for seed in given.seeds if seed not in done]:
                _train_one(tuned, seed, Job(data, protocol, Entry(tuned.method, tuned.settings)), given)


def _train_one(tuned: Record, seed: int, job: Job, given: argparse.Namespace) -> None:
    method, dataset = load_method(tuned.method, **tuned.settings), _loaded(given.data, job.data)
    name = f"{settings.name_of(job.data, job.protocol)}, {tuned.method}, seed {seed}"
    print(name, flush=True)

    def tell(last: Round) -> None:
        print(f"  round {last.index}", end="\r", flush=True)

    record, _ = run(
        tuned.method, method, _federation(job, dataset, seed, given.device), dataset, job.protocol, seed,
        on_round=tell, checkpoint=given.out / f"{name.replace(', ', '-').replace(' ', '-')}.safetensors",
    )  # fmt: skip
    keep_record(replace(record, tuning=tuned.tuning), given.out / "missing.jsonl")
    print(f"{name}: {record.accuracy_client_mean:.4f} in {record.seconds:.0f} s", flush=True)


def joined(folder: Path) -> list[Record]:
    """All records of the folder, and those of the gradient methods on the same settings."""
    own = [record for path in sorted(folder.glob("*--*.jsonl")) for record in read_records(path)]
    known = {(record.data_sha256, record.n_clients, record.partition, record.alpha) for record in own}
    earlier = [record for name in EARLIER for record in read_records(RECORDS / name)]
    earlier += read_records(folder / "missing.jsonl")
    return own + [
        _slim(record) for record in earlier
        if record.method in TRAINED and record.seed in SEEDS
        and (record.data_sha256, record.n_clients, record.partition, record.alpha) in known
    ]  # fmt: skip


DRAWN = {("cifar100", 50, 0.5), ("tinyimagenet200", 50, 0.5), ("pacs", 20, 1.0)}  # data, clients, alpha
PLAIN = ("afl", "apfl_paper", "ditto", "fedavg", "fedavg_ft", "feddbe", "local_head")
ONE_OF_SEVERAL: Mapping[str, Mapping[str, Any]] = {
    "apfl": {"map": "landmarks", "d_primary": "auto"},
    "ridge_to_global": {"map": "landmarks"},
    "gh_ofl": {"kind": "fishermix", "adapt": "finetune"},
    **{name: {"adapt": "finetune"} for name in ("deepafl", "fed3r", "fedcgs", "fedcof", "fedpft")},
}


def is_drawn(record: Record) -> bool:
    """Whether the picture shows it: three settings, and one row of each method."""
    if (record.data.split("-")[0], record.n_clients, record.alpha) not in DRAWN:
        return False
    if record.method in PLAIN:
        return True
    wanted = ONE_OF_SEVERAL.get(record.method)
    return wanted is not None and all(record.settings[name] == value for name, value in wanted.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", nargs="*", default=["cifar100", "tinyimagenet", "pacs"], help="settings, by beginning"
    )
    parser.add_argument("--methods", nargs="*", help="labels of methods, by beginning; all without it")
    parser.add_argument("--without", nargs="*", default=[], help="labels of methods to leave out, by beginning")
    parser.add_argument("--seeds", nargs="*", type=int, default=list(SEEDS))
    parser.add_argument("--data", type=Path, default=settings.DATA, help="folder of the shared features")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after these; what is done is kept")
    parser.add_argument("--out", type=Path, default=Path("runs/pareto"))
    parser.add_argument("--join", type=Path, help="only write the records of --out, and the earlier ones, to this file")
    parser.add_argument("--picture", type=Path, help="only draw the picture of the docs from their records")
    parser.add_argument("--missing", action="store_true", help="only train the seeds that gradient methods lack")
    parser.add_argument(
        "--products", choices=["float32", "bfloat16"], default="float32",
        help="factors of products in --missing; sums stay in float32 (default: float32)",
    )  # fmt: skip
    given = parser.parse_args()
    if given.missing:
        given.out.mkdir(parents=True, exist_ok=True)
        train_missing(given)
        return
    if given.picture:
        drawn = [record for record in read_records(RECORDS / "pareto-twelve.jsonl") if is_drawn(record)]
        sheet = gather(drawn)
        save(figure("pareto", sheet, results(sheet).ours), given.picture)
        return
    if given.join:
        records = joined(given.out)
        with replacing(given.join) as temporary:
            temporary.write_text("".join(f"{record.to_json()}\n" for record in records))
        print(f"{len(records)} records in {given.join}")
        return
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = [
        entry for entry in ENTRIES
        if (given.methods is None or entry.label.startswith(tuple(given.methods)))
        and not entry.label.startswith(tuple(given.without) or ("\0",))
    ]  # fmt: skip
    todo = [Job(*setting, entry) for entry in wanted for setting in settings.chosen(given.only)]
    run_all([job for job in todo if not (given.out / f"{job.label}.jsonl").exists()], given)


if __name__ == "__main__":
    main()
