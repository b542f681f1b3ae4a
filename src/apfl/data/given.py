"""What a Python call is given about data and clients: a dataset and a protocol, and a federation made of them."""

from __future__ import annotations

from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

from apfl.data.federation import Dataset, Federation
from apfl.data.in_memory import with_columns, with_identity
from apfl.data.load import load_data
from apfl.data.partition import PARTITIONS
from apfl.data.protocol import Protocol, federate, protocol_of
from apfl.data.sources import Match, pfllib
from apfl.errors import InputError

__all__ = ["dataset_and_protocol", "federation"]

CLIENT, TEST, GROUP = "client", "test", "group"  # the columns of what is given row by row, and of a `Federation`


def federation(
    data: Any = "digits",
    labels: Any = None,
    *,
    clients: Any = None,
    alpha: float = Protocol.alpha,
    partition: str | Callable[..., Any] | None = None,
    seed: int = 0,
    client_column: str | None = None,
    test_column: str | None = None,
    group_column: str | None = None,
    test_fraction: float = Protocol.test_fraction,
    minimum: int | None = None,
    classes_per_client: int = Protocol.classes_per_client,
    device: str = "auto",
    **options: Any,
) -> Federation:
    """Clients with their training and test rows, for a method's `rounds` or for `apfl.run`.

    ``data``, ``labels`` and ``options`` are those of `apfl.load_data`. ``clients`` is the number of clients, or the
    client of each row. A folder of PFLlib keeps its clients and test rows. The other arguments are those of `apfl.run`.

    >>> federation([[0.0], [1.0], [2.0], [3.0]], ["a", "b", "a", "b"], clients=["north", "north", "south", "south"])
    Federation(2 clients: north, south; 4 training and 0 test rows, 1 feature, 2 classes)
    """
    if clients is partition is client_column is None and _is_pfllib(data):
        client_column, test_column = CLIENT, test_column or TEST
    dataset, protocol = dataset_and_protocol(
        data, labels, clients, alpha, partition, client_column, test_column, group_column, test_fraction, minimum,
        classes_per_client, device, **options,
    )  # fmt: skip
    return federate(dataset, protocol, seed)


def dataset_and_protocol(
    data: Any,
    labels: Any,
    clients: Any,
    alpha: float,
    partition: str | Callable[..., Any] | None,
    client_column: str | None,
    test_column: str | None,
    group_column: str | None,
    test_fraction: float,
    minimum: int | None,
    classes_per_client: int,
    device: str,
    **options: Any,
) -> tuple[Dataset, Protocol]:
    """The rows, and how they become a federation."""
    dataset, recipe = load_data(data, labels, device=device, **options), _recipe(partition)
    number = int(clients) if isinstance(clients, Integral) else None
    if clients is not None and number is None:
        if client_column is not None:
            raise InputError(f"clients and client_column={client_column!r} given; both name the clients: give one")
        dataset, client_column = with_identity(with_columns(dataset, {CLIENT: clients})), CLIENT
    elif clients is partition is client_column is None and isinstance(data, Federation):
        client_column, test_column = CLIENT, TEST
        group_column = GROUP if GROUP in dataset.columns else None
    protocol = protocol_of(
        number, _number("alpha", alpha), recipe, client_column, test_column, group_column,
        _number("test_fraction", test_fraction), minimum, classes_per_client,
    )  # fmt: skip
    return dataset, protocol


def _number(name: str, given: Any) -> float:
    try:
        return float(given)
    except (TypeError, ValueError):
        raise InputError(f"{name}={given!r} given; allowed: a number") from None


def _recipe(partition: str | Callable[..., Any] | None) -> str | None:
    """A partition by name or path; one that is given as an object is known by its own name from now on."""
    return PARTITIONS.adopt(partition) if callable(partition) else partition


def _is_pfllib(data: Any) -> bool:
    return isinstance(data, str | Path) and pfllib.accepts(str(data)) > Match.NO
