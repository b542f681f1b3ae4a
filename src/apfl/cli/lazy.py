"""Commands that are imported when they are called: `apfl --help` and completion need no torch, which takes seconds."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator, Mapping, MutableMapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import click
import typer
from typer.core import TyperCommand, TyperGroup

from apfl.cli.panels import PanelCommand

__all__ = ["Homes", "LazyGroup"]

Homes = Mapping[str, "str | typer.Typer"]


class LazyGroup(TyperGroup):
    """A group that imports a command to run it, and reads the docstrings of its files to list them all.

    ``homes`` names the module of each command, which has a function of the same name; or it has a group.
    """

    homes: ClassVar[Homes] = {}

    def __init__(self, **given: Any) -> None:
        super().__init__(**given)
        self.commands: MutableMapping[str, click.Command] = _Commands(self.homes)
        self.listing = False

    def list_commands(self, ctx: click.Context) -> list[str]:
        """The names, in the order of ``homes``."""
        return list(self.homes)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command; while help is shown, only its name and docstring."""
        if self.listing and cmd_name in self.homes:
            return _described(cmd_name, self.homes[cmd_name])
        return self.commands.get(cmd_name)

    def format_help(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Help, without an import of the commands."""
        self.listing = True
        try:
            super().format_help(ctx, formatter)
        finally:
            self.listing = False

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[Any]:
        """Names of commands and options, without an import of the commands."""
        self.listing = True
        try:
            return super().shell_complete(ctx, incomplete)
        finally:
            self.listing = False


class _Commands(dict[str, click.Command]):
    """The commands by name. Each is made when it is asked for."""

    def __init__(self, homes: Homes) -> None:
        super().__init__()
        self.homes = homes

    def __missing__(self, name: str) -> click.Command:
        self[name] = command = _made(name, self.homes[name])
        return command

    def get(self, name: str, default: Any = None) -> Any:
        """The command of this name, if there is one."""
        return self[name] if name in self.homes else default

    def __contains__(self, name: object) -> bool:
        return name in self.homes

    def __iter__(self) -> Iterator[str]:
        return iter(self.homes)

    def __len__(self) -> int:
        return len(self.homes)

    def items(self) -> Any:
        """Names and commands; this imports all of them."""
        return [(name, self[name]) for name in self.homes]


def _made(name: str, home: str | typer.Typer) -> click.Command:
    if isinstance(home, typer.Typer):
        command: click.Command = typer.main.get_group(home)
        command.name = name
        return command
    alone = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
    alone.command(name, cls=PanelCommand)(getattr(importlib.import_module(home), name))
    return typer.main.get_command(alone)


def _described(name: str, home: str | typer.Typer) -> click.Command:
    """A command that can be listed and not run."""
    words = str(home.info.help) if isinstance(home, typer.Typer) else _docstring(home, name)
    return TyperCommand(name, help=words, rich_markup_mode="rich")


def _docstring(module: str, function: str) -> str:
    """What a function of a module says of itself, read from the source.

    >>> _docstring("apfl.errors", "optional")
    'The module, or an error that says what to install.'
    """
    spec = find_spec(module)
    assert spec is not None
    assert spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text(encoding="utf-8"))
    found = (node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == function)
    return (ast.get_docstring(next(found)) or "").partition("\n\n>>>")[0]
