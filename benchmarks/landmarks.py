"""The twelve settings with `apfl` under given settings: accuracy, bytes, exchanges, seconds, as JSON lines.

    python benchmarks/landmarks.py --set map=landmarks bits=10 d_primary=6144 --seeds 0 1 2 --out runs/landmarks.jsonl

Interrupted, it goes on with the runs that the file lacks. `--only cifar100` takes the settings that begin so.
"""

from __future__ import annotations

import argparse
import json
from functools import cache
from pathlib import Path
from typing import Any

import settings
import torch

from apfl.data.federation import Dataset
from apfl.experiments.run import Protocol, federate, run
from apfl.methods import load_method

KEPT = ("gamma", "beta", "balance", "tau", "weight", "left_out_accuracy", "normalise", "rounding", "pilot", "bytes")


def row_of(
    data: str, protocol: Protocol, given: dict[str, Any], seed: int, folder: Path, device: str
) -> dict[str, Any]:
    """One run, as it is kept."""
    dataset = _loaded(folder, data)
    federation = federate(dataset, protocol, seed).to(device)
    record, _ = run("apfl", load_method("apfl", **given), federation, dataset, protocol, seed)
    total = record.bytes_up + record.bytes_down
    return {
        "setting": settings.name_of(data, protocol), "seed": seed, "settings": given, "device": _name(device),
        "accuracy_client_mean": round(record.accuracy_client_mean, 6), "rounds": record.rounds,
        "megabytes_a_client": round(total / record.n_clients / 1e6, 3), "seconds": round(record.seconds, 3),
        "chosen": {key: record.chosen[key] for key in KEPT if key in record.chosen}, "versions": record.versions,
    }  # fmt: skip


@cache
def _loaded(folder: Path, data: str) -> Dataset:
    return settings.load(folder, data)


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device.startswith("cuda") else "cpu"


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="*", default=[], metavar="NAME=VALUE", help="settings of apfl")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0, 1, 2])
    parser.add_argument("--only", nargs="*", default=["cifar100", "tinyimagenet", "pacs"])
    parser.add_argument("--data", type=Path, default=settings.DATA, help="folder of the shared features")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    chosen = {name: _value(value) for name, _, value in (text.partition("=") for text in given.set)}
    done = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.exists() else []
    known = {(row["setting"], row["seed"], json.dumps(row["settings"], sort_keys=True)) for row in done}
    given.out.parent.mkdir(parents=True, exist_ok=True)
    for seed in given.seeds:
        for data, protocol in settings.chosen(given.only):
            if (settings.name_of(data, protocol), seed, json.dumps(chosen, sort_keys=True)) in known:
                continue
            row = row_of(data, protocol, chosen, seed, given.data, given.device)
            with given.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            told = (row[key] for key in ("setting", "seed", "accuracy_client_mean", "megabytes_a_client", "seconds"))
            print(*told, flush=True)


if __name__ == "__main__":
    main()
