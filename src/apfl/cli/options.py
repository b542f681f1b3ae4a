"""Options that several commands read alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from apfl.data.load import Source
from apfl.data.protocol import Protocol
from apfl.errors import InputError
from apfl.experiments.plan import LARGEST_SEED

__all__ = [
    "AlphaOption",
    "ClientColumnOption",
    "ClientsOption",
    "DataOption",
    "DeviceOption",
    "MinimumOption",
    "PartitionOption",
    "assignment",
    "data_changes",
    "data_options",
    "names_of",
    "protocol_of",
    "seeds_of",
]

DeviceOption = Annotated[
    str,
    typer.Option(
        "--device", help="Device: auto (a GPU if there is one), cpu, cuda, cuda:N, or mps (for the backbone only)."
    ),
]
DataOption = Annotated[str, typer.Option("--data", help=Source.__dataclass_fields__["data"].metadata["help"])]
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
        help="Partition of rows into clients: dirichlet (PFLlib's), dirichlet_plain, classes, domains, iid, given, "
        "or your own, ./mine.py:partition. "
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


def assignment(text: str, example: str) -> tuple[str, str]:
    """Key and value of one --set; ``example`` shows what is expected."""
    key, equals, value = (part.strip() for part in text.partition("="))
    form = "METHOD.KEY=VALUE" if "." in example.partition("=")[0] else "KEY=VALUE"
    if not (key and equals) or (form == "METHOD.KEY=VALUE" and not all(key.partition("."))):
        raise InputError(f"--set {text!r} given; expected {form}, for example {example}")
    return key, value


def data_options(*, argument: bool = False) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Source`: it is called with ``source``. ``argument``: DATA is an argument."""

    def options(each: Field[Any], kind: Any) -> Parameter:
        if each.name == "data" and argument:
            info: Any = typer.Argument(help="Dataset name or path, as for `apfl run --data`.")
            return Parameter(each.name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])
        unset = each.metadata["unset"]
        info = typer.Option(help=_with_default(each, unset), show_default=each.default is not None)
        return Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[kind, info])

    return _adding(options, "source", lambda given: Source(**given))


def data_changes(default: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same options for a command that has a source already: it is called with ``changes``, those that were given.

    ``default`` says in words whose source it is: "the plan's".
    """

    def options(each: Field[Any], kind: Any) -> Parameter:
        info = typer.Option(help=_with_default(each, default), show_default=False)
        return Parameter(each.name, Parameter.KEYWORD_ONLY, default=None, annotation=Annotated[kind | None, info])

    return _adding(
        options, "changes", lambda given: {name: value for name, value in given.items() if value is not None}
    )


def _with_default(each: Field[Any], default: str) -> str:
    return str(each.metadata["help"]) + (f" \\[default: {default}]" if default else "")


def _adding(
    options: Callable[[Field[Any], Any], Parameter], name: str, gather: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that puts one option for each field of `Source` in the place of the parameter ``name``; typer reads
    the signature. --data comes first of all."""
    kinds = get_type_hints(Source)
    first, *rest = (options(each, kinds[each.name]) for each in fields(Source))

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            command(**{name: gather({each.name: given.pop(each.name) for each in fields(Source)})}, **given)

        own = [
            each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature(command, eval_str=True).parameters.values()
        ]
        place = [each.name for each in own].index(name)
        parameters = [first, *own[:place], *rest, *own[place + 1 :]]
        called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate


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
