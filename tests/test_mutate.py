"""The mutations of scripts/mutate: which there are, and that each changes one thing."""

from __future__ import annotations

import sys
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "scripts" / "mutate"


@pytest.fixture(scope="module")
def mutate():
    spec = spec_from_loader("mutate", SourceFileLoader("mutate", str(SCRIPT)))
    module = module_from_spec(spec)
    former, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    spec.loader.exec_module(module)
    sys.dont_write_bytecode = former
    return module


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("a < b", {"a <= b"}),
        ("a is b", {"a is not b"}),
        ("a + 2", {"a - 2", "a + 0"}),
        ("not a", {"a"}),
        ("-a", {"a"}),
        ("a and b", {"a or b"}),
        ("min(a, b)", {"max(a, b)", "min(b, a)"}),
        ("f(*a, b)", set()),
        ("a if b else c", {"a if True else c", "a if False else c"}),
        ("x: Literal[1] = 0", {"x: Literal[1] = 1"}),  # nothing runs an annotation
        ("x = True", {"x = False"}),
    ],
)
def test_each_mutant_changes_one_thing(mutate, line, expected):
    assert {shown for _, _, shown, _ in mutate.mutants(line)} == expected


def test_a_mutant_names_its_line_and_leaves_the_others(mutate):
    source = "def f(a):\n    if a:\n        raise E\n    return 2"
    made = {(line, kind, text.splitlines()[line - 1].strip()) for line, kind, _, text in mutate.mutants(source)}
    assert made == {
        (2, "condition true", "if True:"),
        (2, "condition false", "if False:"),
        (3, "no raise", "pass"),
        (4, "no return value", "return None"),
        (4, "constant", "return 0"),
    }
    for line, _, _, text in mutate.mutants(source):
        changed = [i for i, (a, b) in enumerate(zip(text.splitlines(), source.splitlines(), strict=True), 1) if a != b]
        assert changed == [line]
