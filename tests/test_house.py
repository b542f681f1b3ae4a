"""Rules of the house: who may import whom, and that what is promised is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import apfl

SOURCE = Path(apfl.__file__).parent

# Floors of the house, lowest first; a module may import from its own floor and from those below.
FLOORS = [
    {"errors", "extras", "hub", "missing"},
    {"ridge", "maps", "normalise", "container", "workers", "memory", "undecided"},
    {"streams", "exchange", "leaveout", "leaveout_groups", "heads", "checkpoint", "unfinished"},
    {"gcv", "tables"},
    {"personal"},
    {"federation"},
    {"measure", "partition", "data", "methods", "verify", "backbones", "partial"},
    {"protocol", "estimator_rows"},
    {"estimator", "experiment", "deploy", "features", "pipeline", "tuning", "oracle"},
    {"plan"},
    {"cells"},
    {"estimate", "bench_worker"},
    {"bench", "rerun"},
    {"report"},
    {"flower"},
    {
        "cli",
        "cli_bench",
        "cli_features",
        "cli_federate",
        "cli_leave",
        "cli_models",
        "cli_options",
        "cli_progress",
        "cli_report",
        "cli_rerun",
        "cli_run",
        "cli_site",
    },
]


def rooms() -> dict[str, list[Path]]:
    """Module or package directly under apfl -> its files."""
    found: dict[str, list[Path]] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room != "__init__":
            found.setdefault(room, []).append(path)
    return found


def imported_rooms(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name.split(".")[1] for name in names if name.startswith("apfl.")}


def floor(room: str) -> int:
    (level,) = (i for i, rooms_there in enumerate(FLOORS) if room in rooms_there)
    return level


@pytest.mark.parametrize("room", sorted(rooms()))
def test_imports_go_downwards(room):
    for path in rooms()[room]:
        for other in imported_rooms(path):
            assert floor(other) <= floor(room), f"{path.name} imports {other}, which is above it"


def test_maths_imports_only_numbers():
    for room in (
        "ridge",
        "maps",
        "normalise",
        "streams",
        "exchange",
        "leaveout",
        "leaveout_groups",
        "gcv",
        "tables",
        "personal",
    ):
        tree = ast.parse((SOURCE / f"{room}.py").read_text())
        roots = {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom) and n.module}
        assert not roots & {"sklearn", "pydantic", "typer", "rich", "matplotlib", "flwr"}, room


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
        # The one unpickler there is makes arrays only; tests/test_pfllib.py sees to it.
        assert "import pickle" not in text or path.name == "pfllib.py", path
        # Without weights_only torch.load unpickles; with it, tensors and plain values are all it can make.
        assert text.count("torch.load(") == text.count("torch.load(file, weights_only=True, "), path
        assert "allow_pickle=True" not in text, path
