"""Every command, argument and option says what it is for, in one manner."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from typer.main import get_command

from apfl.cli.app import app

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
