"""Options that several commands read alike."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated

import torch
import typer

from apfl.data.protocol import Protocol
from apfl.errors import InputError
from apfl.experiments.plan import LARGEST_SEED

__all__ = [
    "AlphaOption",
    "ClientColumnOption",
    "ClientsOption",
    "DataOption",
    "MinimumOption",
    "PartitionOption",
    "device_of",
    "names_of",
    "protocol_of",
    "seeds_of",
]

DataOption = Annotated[
    str,
    typer.Option(
        "--data",
        help="Data: 'digits' (built in); a features file (.npz, .npy, .csv, .parquet); or, with --backbone, images: "
        "'cifar100', 'imagenet-r', owner/name on the Hub, a folder of images or of a saved dataset, an .npz.",
    ),
]
ClientsOption = Annotated[
    int | None,
    typer.Option(
        "--clients", help="Number of clients. \\[default: 10, unless --client-column names them]", show_default=False
    ),
]
AlphaOption = Annotated[
    float, typer.Option("--alpha", help="Dirichlet concentration; smaller means more heterogeneous.")
]
PartitionOption = Annotated[
    str | None,
    typer.Option(
        "--partition",
        help="Partition of rows into clients: dirichlet (PFLlib's), dirichlet_plain, classes, domains, iid, or given. "
        "\\[default: dirichlet; with --client-column, given]",
        show_default=False,
    ),
]
ClientColumnOption = Annotated[
    str | None,
    typer.Option(help="Column that names each row's client (with --partition domains, its domain)."),
]

MinimumOption = Annotated[
    int | None, typer.Option(help="Fewest rows of a client in a Dirichlet draw.", show_default=False, min=1)
]


def names_of(text: str, have: Iterable[str]) -> list[str]:
    """The names of --methods; at least one. Whether each is one of those we have is for the caller."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError(f"--methods {text!r} given; name at least one, with commas (have: {', '.join(have)})")
    return names


def seeds_of(text: str) -> list[int]:
    """The numbers of --seeds."""
    try:
        seeds = [int(part) for part in text.split(",")]
    except ValueError:
        raise InputError(f"--seeds {text!r} given; expected whole numbers with commas, for example 0,1,2") from None
    if not 0 <= min(seeds) <= max(seeds) <= LARGEST_SEED or len(set(seeds)) < len(seeds):
        raise InputError(f"--seeds {text!r} given; they must be from 0 to {LARGEST_SEED} and differ from each other")
    return seeds


def device_of(name: str) -> torch.device:
    """The device of --device."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index == "" or index.isdigit()):
        raise InputError(f"--device {name} given; allowed are auto, cpu, cuda and cuda:N (float64 is needed)")
    if kind == "cuda" and (not torch.cuda.is_available() or int(index or 0) >= torch.cuda.device_count()):
        raise InputError(
            f"--device {name} given, but torch sees {torch.cuda.device_count()} GPUs here; use --device cpu"
        )
    return torch.device(name)


def protocol_of(
    clients: int | None,
    alpha: float,
    partition: str | None,
    client_column: str | None,
    test_column: str | None = None,
    group_column: str | None = None,
    test_fraction: float = Protocol.test_fraction,
    minimum: int | None = None,
    classes_per_client: int = Protocol.classes_per_client,
) -> Protocol:
    """The protocol of --clients, --alpha, --partition and the columns."""
    if partition is None:
        partition = Protocol.partition if client_column is None else "given"
    if clients is None and partition != "given":
        clients = Protocol.n_clients
    return Protocol(
        partition, clients, alpha, minimum, classes_per_client, test_fraction, client_column, test_column, group_column
    )
