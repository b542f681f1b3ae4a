"""The automatic choice against the best choice on the test rows, and against the paper's family.

    python benchmarks/auto.py --data ../shared/data --out runs/auto [--device cuda] [--settings cifar100 pacs]

Twelve settings, three seeds, and digits beside them. For each: `apfl` as it is (which never sees a test row),
`apfl_paper`, and the *oracle*: the best single (gamma, beta, lambda, tau) on a grid, chosen on the test rows by the
mean over seeds, with everything else as in `apfl`. Writes OUT/records.jsonl as it goes and prints a table.
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import numpy as np
import settings
import torch

from apfl.data.federation import Dataset
from apfl.experiments.oracle import BALANCES, BETAS, GAMMAS, TAUS, on_test
from apfl.experiments.record import keep_record
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import load_method


def measure(
    data: str, dataset: Dataset, protocol: Protocol, seeds: list[int], device: str, out: Path
) -> dict[str, object]:
    accuracy: dict[str, list[float]] = {"apfl": [], "apfl_paper": []}
    tables, start = [], time.perf_counter()
    for seed in seeds:
        federation = federate(dataset, protocol, seed).to(device)
        for name in accuracy:
            record, _ = run(name, load_method(name), federation, dataset, protocol, seed)
            keep_record(record, out / "records.jsonl")
            accuracy[name].append(record.accuracy_client_mean)
        tables.append(on_test(load_method("apfl"), federation, seed).accuracy)
    mean = torch.stack(tables).mean(0)
    where = np.unravel_index(int(mean.argmax()), mean.shape)
    best = [axis[i] for axis, i in zip((GAMMAS, BETAS, BALANCES, TAUS), where, strict=True)]
    row = {
        "setting": settings.name_of(data, protocol), "protocol": asdict(protocol), "apfl": accuracy["apfl"],
        "apfl_paper": accuracy["apfl_paper"], "oracle": float(mean.max()), "oracle_setting": best,
        "seconds": time.perf_counter() - start,
    }  # fmt: skip
    with (out / "oracle.jsonl").open("a") as stream:
        stream.write(json.dumps(row) + "\n")
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=settings.DATA)
    parser.add_argument("--out", type=Path, default=Path("runs/auto"))
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--settings", nargs="+", default=list(settings.FILES), help="beginnings of their names")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    loaded: dict[str, Dataset] = {}
    print("| setting | apfl_paper | apfl (automatic) | oracle on test | apfl - oracle | seconds |")
    print("| --- | --- | --- | --- | --- | --- |")
    for data, protocol in settings.chosen(arguments.settings):
        if data not in loaded:
            loaded[data] = settings.load(arguments.data, data)
        row = measure(data, loaded[data], protocol, arguments.seeds, arguments.device, arguments.out)
        ours, paper = (100 * np.mean(row[name]) for name in ("apfl", "apfl_paper"))  # type: ignore[arg-type]
        spread = 100 * np.std(row["apfl"], ddof=1) if len(arguments.seeds) > 1 else 0.0  # type: ignore[arg-type]
        oracle = 100 * float(row["oracle"])  # type: ignore[arg-type]
        print(
            f"| {row['setting']} | {paper:.1f} | {ours:.1f} ± {spread:.1f} | {oracle:.1f} | {ours - oracle:+.2f} "
            f"| {row['seconds']:.0f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
