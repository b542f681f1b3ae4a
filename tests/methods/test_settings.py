"""`apfl methods NAME`: what each setting means and may be."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import pytest
from pydantic import Field

from apfl.data.federation import Shard
from apfl.methods import Method, Round, load_method, method_class, method_names
from apfl.methods._settings import settings_of
from tests.commands import here


@dataclass(frozen=True)
class Mine(Method):
    """A method of one's own."""

    depth: Annotated[int, Field(ge=1, lt=9)] = 3  # of the tree (`some.module`)
    lr: float = 0.5  # halved each round
    plain: Literal["a", "b"] | None = None

    def rounds(self, clients: Sequence[Shard], n_classes: int, seed: int) -> Iterator[Round]:
        yield from ()


@dataclass(frozen=True)
class Child(Mine):
    """Inherits its settings."""

    depth: Annotated[int, Field(ge=1, lt=9)] = 4


@pytest.mark.parametrize("name", method_names())
def test_every_setting_says_what_it_means_and_may_be(name):
    for each in settings_of(method_class(name)):
        assert each.meaning, f"{name}.{each.name} needs a comment beside it, or a line in MEANINGS"
        assert "see its source" not in each.allowed


def test_what_is_allowed_is_what_is_accepted():
    by_name = {each.name: each for each in settings_of(method_class("apfl"))}
    assert by_name["gamma"].allowed == "a number > 0 or auto"
    assert by_name["bits"].allowed == "0 or a whole number >= 8 and <= 32 or auto"
    for value in by_name["activation_primary"].allowed.split(", "):
        load_method("apfl", map="random", activation_primary=value)
    assert by_name["sketch"].default == "128"
    load_method("apfl", **{name: each.default for name, each in by_name.items()})  # as it is shown


def test_a_method_of_ones_own_explains_itself_by_comments():
    depth, lr, plain = settings_of(Mine)
    assert (depth.allowed, depth.default, depth.meaning) == ("a whole number >= 1 and < 9", "3", "of the tree")
    assert lr.meaning == "learning rate; halved each round"
    assert (plain.allowed, plain.meaning) == ("a, b or nothing", "")
    assert [each.meaning for each in settings_of(Child)] == ["", "learning rate; halved each round", ""]
    made_in_a_prompt = type("Typed", (Mine,), {})
    assert [each.name for each in settings_of(made_in_a_prompt)] == ["depth", "lr", "plain"]


def test_the_command_shows_them(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert here("methods", "apfl") == 0
    shown = capsys.readouterr().out
    assert "activation_refinement" in shown
    assert "weight of the" in shown
    assert max(map(len, shown.splitlines())) <= 80
    assert here("methods", "apfk") == 2
    assert "did you mean 'apfl'" in capsys.readouterr().err
