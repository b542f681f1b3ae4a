"""Rules of the house: who may import whom, and that what is promised is there."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

import apfl

SOURCE = Path(apfl.__file__).parent

# The rooms, lowest first; a room imports from itself and from those before it.
ROOMS = [
    *("errors", "files"),
    *("maths", "models", "data", "methods"),
    *("testing", "experiments", "report", "federate", "cli"),
]

# What maths may import.
NUMBERS = {"torch", "numpy", "scipy", "apfl.errors", "apfl.maths"}
BESIDES = {"machine.py": {"threadpoolctl"}}  # cores and memory, which maps and methods ask for


def files_of(room: str) -> list[Path]:
    return sorted((SOURCE / room).rglob("*.py")) or [SOURCE / f"{room}.py"]


def imported(path: Path) -> set[str]:
    """What a file imports, anywhere in it: ``torch``, ``apfl.maths``."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path} has a relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {".".join(name.split(".")[: 2 if name.startswith("apfl.") else 1]) for name in names}


def test_every_file_is_in_a_room():
    entries = {path.stem for path in SOURCE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    assert entries == {"__init__", "__main__", *ROOMS}


def test_the_hall_is_small():
    entries = sorted(path.name for path in SOURCE.iterdir() if path.name != "__pycache__")
    assert len(entries) <= 14, entries


@pytest.mark.parametrize("room", ROOMS)
def test_imports_go_downwards(room):
    allowed = {f"apfl.{other}" for other in ROOMS[: ROOMS.index(room) + 1]}
    for path in files_of(room):
        above = {name for name in imported(path) if name.removeprefix("apfl.") in ROOMS} - allowed
        assert not above, f"{path.relative_to(SOURCE)} imports {above}, which {room} may not"


def test_maths_imports_numbers_only():
    for path in files_of("maths"):
        others = imported(path) - NUMBERS - BESIDES.get(path.name, set()) - set(sys.stdlib_module_names)
        assert not others, f"{path.name} imports {others}"


def test_public_names_exist_and_are_sorted():
    assert apfl.__all__ == sorted(apfl.__all__)
    for name in apfl.__all__:
        assert getattr(apfl, name).__doc__, name
    promised_by_name = "Statistics statistics solve random_map fit_refinement DualStream APFLClassifier load_method"
    for promised in promised_by_name.split(" "):
        assert promised in apfl.__all__


def test_nothing_unpickles():
    for path in SOURCE.rglob("*.py"):
        text = path.read_text()
        assert "pickle.load" not in text, path
        # The one unpickler there is makes arrays only; tests/data/test_pfllib.py sees to it.
        assert "import pickle" not in text or path.name == "pfllib.py", path
        # Without weights_only torch.load unpickles; with it, tensors and plain values are all it can make.
        assert text.count("torch.load(") == text.count("torch.load(file, weights_only=True, "), path
        assert "allow_pickle=True" not in text, path


def test_sql_is_in_the_ledger():
    statement = re.compile(r"\s*(SELECT|INSERT|UPDATE|DELETE|CREATE|DROP|BEGIN|COMMIT|ROLLBACK|PRAGMA|VACUUM)\b")
    with_sql = set()
    for path in SOURCE.rglob("*.py"):
        texts = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        if any(isinstance(text, str) and statement.match(text) for text in texts):
            with_sql.add(path.relative_to(SOURCE).as_posix())
    assert with_sql == {"federate/ledger.py", "federate/flower/contacts.py"}  # the latter reads Flower's database


def test_locks_are_in_files():
    assert [path.name for path in SOURCE.rglob("*.py") if "flock" in path.read_text()] == ["files.py"]


@pytest.mark.parametrize("name", apfl.__all__)
def test_public_names_have_an_example(name):
    assert ">>> " in (getattr(apfl, name).__doc__ or "")  # which is run: doctests are tests
