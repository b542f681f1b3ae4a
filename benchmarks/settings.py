"""The twelve settings of every comparison in the docs, and digits beside them."""

from __future__ import annotations

from pathlib import Path

from apfl.data import load_dataset
from apfl.data.federation import Dataset
from apfl.experiments.run import Protocol

DATA = Path(__file__).parents[2] / "shared" / "data"
FILES = {
    "digits": "digits",
    "cifar100": "cifar100-efficientnet-lite0.npz",
    "tinyimagenet": "tinyimagenet200-efficientnet-lite0.npz",
    "pacs": "pacs-efficientnet-lite0.npz",
}
SETTINGS: list[tuple[str, Protocol]] = [
    *(("cifar100", Protocol(n_clients=k, alpha=a)) for k in (50, 100) for a in (0.1, 0.5, 1.0)),
    *(("tinyimagenet", Protocol(n_clients=50, alpha=a, minimum=10)) for a in (0.1, 0.5, 1.0)),
    *(("pacs", Protocol(n_clients=20, alpha=a, minimum=10)) for a in (0.1, 1.0)),
    ("pacs", Protocol("domains", 20, client_column="domains")),
    ("digits", Protocol()),
]


def name_of(data: str, protocol: Protocol) -> str:
    spread = "5 per domain" if protocol.partition == "domains" else f"alpha {protocol.alpha:g}"
    return f"{data}, {protocol.n_clients} clients, {spread}"


def chosen(parts: list[str]) -> list[tuple[str, Protocol]]:
    """The settings whose names begin with one of ``parts``."""
    found = [s for s in SETTINGS if any(name_of(*s).startswith(part) for part in parts)]
    if not found:
        raise SystemExit(f"no setting begins with {parts}; have:\n" + "\n".join(name_of(*s) for s in SETTINGS))
    return found


def load(folder: Path, data: str) -> Dataset:
    return load_dataset("digits" if data == "digits" else str(folder / FILES[data]))
