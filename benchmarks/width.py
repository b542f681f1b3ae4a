"""What width buys: accuracy, bytes and seconds of `apfl` against d_primary, with the paper's d = 1024 marked.

    python benchmarks/width.py run --data FEATURES.npz --out runs/width [--device cuda] [--widths 256 512 ...]
    python benchmarks/width.py plot runs/width/records.jsonl docs/results/width.svg

`run` also runs `apfl_paper` at every width: the ratio of their seconds is what choosing the settings costs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch

from apfl.data import load_dataset
from apfl.errors import InputError
from apfl.experiments.record import Record, keep_record, read_records
from apfl.experiments.run import Protocol, federate
from apfl.experiments.run import run as run_method
from apfl.methods import load_method


def measure(data: Path, out: Path, device: str, widths: list[int], seeds: list[int], n_clients: int) -> None:
    dataset, protocol = load_dataset(str(data)), Protocol(n_clients=n_clients, alpha=0.5)
    print("| d | apfl | apfl_paper | MB up a client | seconds apfl | seconds apfl_paper | ratio |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for seed in seeds:  # the first run of a process pays for its libraries
        federation = federate(dataset, protocol, seed).to(device)
        run_method("apfl", load_method("apfl", d_primary=256), federation, dataset, protocol, seed)
        break
    for width in widths:
        found: dict[str, list[Record]] = {"apfl": [], "apfl_paper": []}
        for seed in seeds:
            federation = federate(dataset, protocol, seed).to(device)
            for name, records in found.items():
                method = load_method(name, d_primary=width, d_refinement=width)
                try:
                    record, _ = run_method(name, method, federation, dataset, protocol, seed)
                except InputError as error:
                    print(f"width {width}: {error}")
                    return
                keep_record(record, out / "records.jsonl")
                records.append(record)
        ours, paper = (found[name] for name in ("apfl", "apfl_paper"))
        accuracy = [100 * np.mean([r.accuracy_client_mean for r in records]) for records in (ours, paper)]
        seconds = [np.median([r.seconds for r in records]) for records in (ours, paper)]
        print(
            f"| {width} | {accuracy[0]:.1f} | {accuracy[1]:.1f} | {ours[0].bytes_up / n_clients / 1e6:.1f} "
            f"| {seconds[0]:.2f} | {seconds[1]:.2f} | {seconds[0] / seconds[1]:.1f} |",
            flush=True,
        )


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    records = read_records(source)
    figure, axes = plt.subplots(1, 3, figsize=(11, 3.4), sharey=True, layout="constrained")
    # Okabe and Ito's colours, and another marker for each: readable in print and for colour-blind readers.
    for name, colour, marker in (("apfl", "#0072B2", "o"), ("apfl_paper", "#D55E00", "s")):
        widths = sorted({int(r.settings["d_primary"]) for r in records if r.method == name})
        rows = {w: [r for r in records if r.method == name and r.settings["d_primary"] == w] for w in widths}
        accuracy = [100 * np.mean([r.accuracy_client_mean for r in rows[w]]) for w in widths]
        axis_values = (
            widths,
            [np.mean([(r.bytes_up + r.bytes_down) / r.n_clients / 1e6 for r in rows[w]]) for w in widths],
            [np.median([r.seconds for r in rows[w]]) for w in widths],
        )
        for axis, values in zip(axes, axis_values, strict=True):
            axis.plot(values, accuracy, marker=marker, color=colour, label=name, linewidth=1.5, markersize=5)
            if name == "apfl_paper" and 1024 in widths:
                at = widths.index(1024)
                axis.annotate(
                    "the paper's d = 1024",
                    (values[at], accuracy[at]),
                    xytext=(9, -3),
                    textcoords="offset points",
                    fontsize=8,
                )
    first = records[0]
    for axis, label in zip(axes, ("width d", "MB a client, both ways", f"seconds on {first.device}"), strict=True):
        axis.set_xscale("log", base=2 if label == "width d" else 10)
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("mean client accuracy, %")
    axes[0].legend(frameon=False)
    seeds = len({r.seed for r in records})
    what = f"{first.data}, {first.n_clients} clients, Dirichlet {first.alpha:g}, {seeds} seed{'s' * (seeds > 1)}"
    figure.suptitle(what, fontsize=10)
    target.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(target)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run")
    shared = Path(__file__).parents[2] / "shared" / "data" / "cifar100-efficientnet-lite0.npz"
    runs.add_argument("--data", type=Path, default=shared)
    runs.add_argument("--out", type=Path, default=Path("runs/width"))
    runs.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    runs.add_argument("--widths", type=int, nargs="+", default=[256, 512, 1024, 2048, 4096, 8192, 16384])
    runs.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    runs.add_argument("--clients", type=int, default=50)
    plots = commands.add_parser("plot")
    plots.add_argument("records", type=Path)
    plots.add_argument("target", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "plot":
        plot(arguments.records, arguments.target)
    else:
        measure(arguments.data, arguments.out, arguments.device, arguments.widths, arguments.seeds, arguments.clients)


if __name__ == "__main__":
    main()
