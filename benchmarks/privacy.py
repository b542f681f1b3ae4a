"""What noise costs: accuracy of `apfl` against epsilon, with noise at the server and in shares of the clients.

    python benchmarks/privacy.py run --data FEATURES.npz --public OTHER.npz --out runs/privacy [--device cuda]
    python benchmarks/privacy.py table runs/privacy/records.jsonl
    python benchmarks/privacy.py plot runs/privacy/records.jsonl docs/results/privacy.svg

Needs `pip install 'apfl[privacy]'`. OTHER.npz has features of other data from the same backbone, for the landmarks.
Beside them stand landmarks of everyone's moments, which take a share of the budget, and free ones.
"alone" uses nothing of other clients. A run that has its record is not repeated. Without data of your own:
`--data digits --public free --clients 10 --width 128`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from apfl.data import load_dataset
from apfl.experiments.record import Record, keep_record, read_records
from apfl.experiments.run import Protocol, federate
from apfl.experiments.run import run as run_method
from apfl.methods import load_method

EPSILONS = (1.0, 2.0, 4.0, 8.0)
CENTRAL, SHARES, NONE, ALONE = "noise at the server", "noise in shares", "no noise", "alone"
MOMENTS, FREE = "noise at the server, landmarks of noisy moments", "noise at the server, free landmarks"


def cells() -> list[dict[str, Any]]:
    """The settings of each run, the most wanted first."""
    central, shares = ([{"epsilon": e, "noise": kind} for e in (1.0, 4.0, 8.0, 2.0)] for kind in ("central", "shares"))
    ends = [{"bits": 16}, {"bits": 16, "weight": 0.0, "scope": "client"}]
    others = [cell | {"landmarks": source} for source in ("federation", "free") for cell in central[:3]]
    return [*central[:3], *ends, central[3], *shares, *others]


def kinds_of(records: Sequence[Record]) -> list[str]:
    """What each record shows. Free landmarks are a kind of their own if others are of public features."""
    public = any(r.settings["landmarks"] not in ("federation", "free") for r in records)
    others = {"federation": MOMENTS} | ({"free": FREE} if public else {})
    return [
        (ALONE if r.settings["weight"] == 0 else NONE) if r.settings["epsilon"] == "none"
        else SHARES if r.settings["noise"] == "shares" else others.get(r.settings["landmarks"], CENTRAL)
        for r in records
    ]  # fmt: skip


def key(alpha: float, seed: int, settings: Any) -> tuple[Any, ...]:
    return alpha, seed, *(settings[name] for name in ("epsilon", "noise", "weight", "landmarks"))


def measure(args: argparse.Namespace) -> None:
    dataset, target = load_dataset(str(args.data)), args.out / "records.jsonl"
    done = {key(r.protocol["alpha"], r.seed, r.settings) for r in read_records(target)}
    shared = {"d_primary": args.width, "map": "landmarks", "landmarks": str(args.public), "normalise": "root"}
    for cell in cells():
        for alpha in args.alphas:
            for seed in args.seeds:
                method = load_method("apfl", **shared | {"bits": 24} | cell)
                if key(alpha, seed, vars(method)) in done:
                    continue
                protocol = Protocol(n_clients=args.clients, alpha=alpha)
                federation = federate(dataset, protocol, seed).to(args.device)
                record, _ = run_method("apfl", method, federation, dataset, protocol, seed)
                keep_record(record, target)
                print(f"{alpha} {cell}: {100 * record.accuracy_client_mean:.1f}, {record.seconds:.0f} s", flush=True)


def of_kind(records: Sequence[Record], alpha: float, kind: str, epsilon: float | str) -> list[Record]:
    """Those of all seeds."""
    wanted = alpha, kind, epsilon
    each = zip(records, kinds_of(records), strict=True)
    return [r for r, own in each if (r.protocol["alpha"], own, r.settings["epsilon"]) == wanted]


def accuracies(records: Sequence[Record], alpha: float, kind: str, epsilon: float | str) -> list[float]:
    """In %, of all seeds."""
    return [100 * r.accuracy_client_mean for r in of_kind(records, alpha, kind, epsilon)]


def in_words(values: Sequence[float]) -> str:
    """The mean, and with several seeds how far apart the highest and the lowest are."""
    if not values:
        return ""
    return f"{np.mean(values):.1f}" + (f" ({min(values):.1f} to {max(values):.1f})" if len(values) > 1 else "")


def table(source: Path) -> None:
    records = read_records(source)
    print("| alpha | " + " | ".join(f"{e:g}" for e in EPSILONS), end="")
    print(f" | {NONE} | {ALONE} |\n" + "| --- " * (len(EPSILONS) + 3) + "|")
    for alpha in sorted({r.protocol["alpha"] for r in records}):
        for kind in (CENTRAL, SHARES, MOMENTS, FREE):
            if kind in (MOMENTS, FREE) and kind not in kinds_of(records):
                continue
            noisy = [in_words(accuracies(records, alpha, kind, e)) for e in EPSILONS]
            ends = [in_words(accuracies(records, alpha, other, "none")) for other in (NONE, ALONE)]
            print(f"| {alpha:g}, {kind} | " + " | ".join([*noisy, *ends]) + " |")
        alone = []
        for kind, e in [*((CENTRAL, e) for e in EPSILONS), (NONE, "none")]:
            found = of_kind(records, alpha, kind, e)
            alone.append(in_words([100 * r.chosen["left_out_accuracy_primary_alone"] for r in found]))
        print(f"| {alpha:g}, primary alone, left-out rows | " + " | ".join(alone) + " | |")


def plot(source: Path, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "privacy"
    from matplotlib import pyplot as plt

    records = read_records(source)
    alphas = sorted({r.protocol["alpha"] for r in records})
    figure, axes = plt.subplots(1, len(alphas), figsize=(4.6 * len(alphas), 3.4), layout="constrained", squeeze=False)
    for axis, alpha in zip(axes[0], alphas, strict=True):
        # Okabe and Ito's colours, and another marker for each: readable in print and for colour-blind readers.
        drawn = ((CENTRAL, "#0072B2", "o"), (SHARES, "#D55E00", "s"), (MOMENTS, "#009E73", "^"), (FREE, "#CC79A7", "v"))
        for kind, colour, marker in drawn:
            known = {e: accuracies(records, alpha, kind, e) for e in EPSILONS}
            xs = [e for e, values in known.items() if values]
            if not xs:
                continue
            axis.plot(xs, [np.mean(known[e]) for e in xs], marker=marker, color=colour, label=kind, linewidth=1.5)
        for kind, style in ((NONE, "-"), (ALONE, ":")):
            if values := accuracies(records, alpha, kind, "none"):
                axis.axhline(float(np.mean(values)), color="#555555", linestyle=style, label=kind, linewidth=1.2)
        axis.set(title=f"Dirichlet {alpha:g}", xlabel="epsilon", xscale="log", xticks=EPSILONS)
        axis.set_xticklabels([f"{e:g}" for e in EPSILONS])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("accuracy, mean over clients (%)")
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=3, fontsize=8)
    figure.savefig(target, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    run = verbs.add_parser("run")
    run.add_argument("--data", type=Path, required=True)
    run.add_argument("--public", type=Path, required=True)
    run.add_argument("--out", type=Path, required=True)
    run.add_argument("--alphas", type=float, nargs="+", default=[0.1, 1.0])
    run.add_argument("--seeds", type=int, nargs="+", default=[0])
    run.add_argument("--clients", type=int, default=50)
    run.add_argument("--width", type=int, default=1024)
    run.add_argument("--device", default="cpu")
    for verb in ("table", "plot"):
        other = verbs.add_parser(verb)
        other.add_argument("records", type=Path)
        if verb == "plot":
            other.add_argument("target", type=Path)
    args = parser.parse_args()
    if args.verb != "run" and not args.records.is_file():
        parser.error(f"there is no file {args.records}; `run` writes OUT/records.jsonl")
    if args.verb == "run":
        measure(args)
    elif args.verb == "table":
        table(args.records)
    else:
        plot(args.records, args.target)


if __name__ == "__main__":
    main()
