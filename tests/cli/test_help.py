"""Every command, argument and option says what it is for, in one manner."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import fields

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from apfl.cli.app import app
from apfl.cli.panels import DATA, PANELS
from apfl.data.load import Source

ODD = ("so many", "otherwise than", "goes on", "what a kill leaves")


def helps(command, path: str = "apfl") -> Iterator[tuple[str, str]]:
    """Each command, argument and visible option under ``command``, with its help text."""
    yield path, command.help or ""
    for parameter in command.params:
        if not getattr(parameter, "hidden", False):  # kept only to refuse it with a reason
            yield f"{path} {parameter.name}", getattr(parameter, "help", None) or ""
    for name, nested in getattr(command, "commands", {}).items():
        yield from helps(nested, f"{path} {name}")


def faults(text: str) -> list[str]:
    """What is wrong with a help text; a default in brackets may follow its full stop."""
    sentence = re.sub(r"\s*\\?\[default: [^\]]*\]$", "", " ".join(text.split()))
    found = [] if sentence[:1].isupper() else ["does not start with a capital letter"]
    found += [] if sentence.endswith(".") else ["does not end with a full stop"]
    return found + [f"says '{words}'" for words in ODD if words in sentence]


EVERYTHING = dict(helps(get_command(app)))


def test_the_walk_sees_all_commands_and_options():
    assert {"apfl run data", "apfl bench plan", "apfl federate join server", "apfl federate leave site"} <= set(
        EVERYTHING
    )
    assert len(EVERYTHING) > 150


@pytest.mark.parametrize("where", EVERYTHING)
def test_help_is_a_sentence(where):
    assert not faults(EVERYTHING[where]), EVERYTHING[where]


def test_faults_are_noticed():
    assert not faults("Number of clients. \\[default: 10]")
    for text in ("", "cls or mean.", "Number of clients \\[default: 10]", "Fold sites in by so many."):
        assert faults(text), text


def commands(command, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """Each command under ``command``, with the names of its visible options."""
    visible = [each for each in command.params if not getattr(each, "hidden", False)]
    yield path, [name for each in visible for name in (*each.opts, *each.secondary_opts) if name.startswith("--")]
    for name, nested in getattr(command, "commands", {}).items():
        yield from commands(nested, (*path, name))


COMMANDS = dict(commands(get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_nothing_is_cut_at_80_columns(path):
    shown = CliRunner().invoke(app, [*path, "--help"], env={"COLUMNS": "80"}, terminal_width=80).output
    assert max(len(line) for line in shown.splitlines()) <= 80
    cut = [name for name in COMMANDS[path] if not re.search(rf"(?<![\w-]){name}(?![\w…-])", shown)]
    assert not cut
    assert "…" not in shown, "neither is a word of a help text"


def test_the_panel_of_data_has_every_option_of_a_source():
    assert DATA.split() == [each.name for each in fields(Source)]


@pytest.mark.parametrize("command", PANELS)
def test_panels_name_options_that_there_are(command):
    names = {name.rpartition(" ")[2] for name in EVERYTHING if name.startswith(f"apfl {command} ")} | {"help"}
    listed = [name for text in PANELS[command].values() for name in text.split()]
    assert set(listed) <= names
    assert len(listed) == len(set(listed)), "each in one panel"
    shown = CliRunner().invoke(app, [*command.split(), "--help"], env={"COLUMNS": "80"}).output
    assert re.findall(r"─ (.+?) ─", shown)[-len(PANELS[command]) :] == list(PANELS[command]), "in this order"
