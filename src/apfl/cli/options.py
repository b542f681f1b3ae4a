"""Options that several commands read alike."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import Field, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Annotated, Any, get_type_hints

import typer

from apfl.data.source import Source
from apfl.errors import InputError

__all__ = [
    "EVERY",
    "TABLE",
    "AlphaOption",
    "ClientColumnOption",
    "ClientsOption",
    "DataOption",
    "DeviceOption",
    "GroupColumnOption",
    "MinimumOption",
    "PartitionOption",
    "TestColumnOption",
    "assignment",
    "data_changes",
    "data_options",
    "names_of",
]

EVERY = tuple(each.name for each in fields(Source))
TABLE = ("label_column", "feature_column", "features", "drop")  # the options of a table

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
TestColumnOption = Annotated[str | None, typer.Option(help="Column that is true for test rows.")]
GroupColumnOption = Annotated[
    str | None, typer.Option(help="Column of groups; rows of one group (a patient, say) stay on one side of the split.")
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


def assignment(text: str, example: str, option: str = "--set") -> tuple[str, str]:
    """Key and value of one --set, or of a like option; ``example`` shows what is expected."""
    key, equals, value = (part.strip() for part in text.partition("="))
    form = "METHOD.KEY=VALUE" if "." in example.partition("=")[0] else "KEY=VALUE"
    if not (key and equals) or (form == "METHOD.KEY=VALUE" and not all(key.partition("."))):
        raise InputError(f"{option} {text!r} given; expected {form}, for example {example}")
    return key, value


def data_options(
    *, argument: bool = False, only: Sequence[str] = EVERY
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Give a command the options of `Source`: it is called with ``source``. ``argument``: DATA is an argument.

    ``only`` names some of them, for a command that has an own way to say where the data are.
    """

    def options(each: Field[Any], kind: Any) -> Parameter:
        if each.name == "data" and argument:
            info: Any = typer.Argument(help="Dataset name or path, as for `apfl run --data`.")
            return Parameter(each.name, Parameter.KEYWORD_ONLY, annotation=Annotated[kind, info])
        unset = each.metadata["unset"]
        info = typer.Option(help=_with_default(each, unset), show_default=each.default is not None)
        return Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=Annotated[kind, info])

    return _adding(options, "source", lambda given: Source(**given), only)


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
    options: Callable[[Field[Any], Any], Parameter],
    name: str,
    gather: Callable[[dict[str, Any]], Any],
    only: Sequence[str] = EVERY,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """A decorator that puts one option for each field of `Source` in the place of the parameter ``name``; typer reads
    the signature. --data comes first of all."""
    kinds = get_type_hints(Source)
    made = [options(each, kinds[each.name]) for each in fields(Source) if each.name in only]
    first = [each for each in made if each.name == "data"]
    rest = [each for each in made if each.name != "data"]

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        @wraps(command)
        def called(**given: Any) -> None:
            command(**{name: gather({each.name: given.pop(each.name) for each in made})}, **given)

        own = [
            each.replace(kind=Parameter.KEYWORD_ONLY) for each in signature(command, eval_str=True).parameters.values()
        ]
        place = [each.name for each in own].index(name)
        parameters = [*first, *own[:place], *rest, *own[place + 1 :]]
        called.__signature__ = Signature(parameters)  # type: ignore[attr-defined]
        called.__annotations__ = {each.name: each.annotation for each in parameters}
        return called

    return decorate
