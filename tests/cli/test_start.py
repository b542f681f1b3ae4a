"""What a command imports before it does anything; benchmarks/start.py has the seconds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from apfl.cli.app import Commands, Federate, app
from apfl.cli.lazy import LazyGroup, _described
from apfl.federate import Terms
from apfl.federate.inprocess import simulate
from tests.federate.federation_toys import FIXED, make_sites

HEAVY = ("torch", "sklearn", "scipy", "numpy", "matplotlib", "flwr")


def imported_by(*arguments: str, code: int = 0) -> set[str]:
    """The heavy libraries that a call of ``apfl``, which ends with this code, has imported at its end."""
    return imported_in(f"""
from apfl.cli import main
try:
    main({list(arguments)!r})
except SystemExit as stopped:
    assert (stopped.code or 0) == {code}, stopped.code
""")


def imported_in(lines: str) -> set[str]:
    """The heavy libraries that some lines of Python have imported at their end."""
    code = f"{lines}\nimport sys\nprint('heavy:', *(name for name in {HEAVY!r} if name in sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.rpartition("heavy:")[2].split())


@pytest.mark.parametrize(
    "words", [["--help"], ["--version"], ["federate", "--help"], ["federate", "keys", "--help"]], ids=" ".join
)
def test_help_and_version_import_nothing_heavy(words):
    assert imported_by(*words) == set()


@pytest.fixture
def federation(tmp_path) -> Path:
    """The folder of a federation that has published."""
    simulate(make_sites(tmp_path), Terms("f", method=FIXED), tmp_path / "server")
    return tmp_path / "server"


def test_looking_at_a_federation_needs_no_torch(federation):
    for words in (["status", str(federation)], ["status", str(federation), "--json"], ["result", str(federation)]):
        assert imported_by("federate", *words) == set()


def test_a_server_that_is_started_again_reads_its_terms_without_torch(federation):
    draft = Terms("f", method=FIXED).to_json()
    lines = "from apfl.cli.federate import _agreement\nfrom pathlib import Path\n"
    lines += f"assert _agreement(Path({str(federation)!r}), None, {{}}) == {draft!r}"
    assert imported_in(lines) == set()


def test_keys_are_made_without_torch(tmp_path):
    pytest.importorskip("flwr")
    assert "torch" not in imported_by("federate", "keys", str(tmp_path), "--host", "h", "--site", "a")
    assert (tmp_path / "a.pub").exists()


@pytest.mark.parametrize(
    "words",
    [
        ["join", "--server", "somewhere", "--data", "digits", "--name", "a"],
        ["join", "--server", "fed.example.org:9091", "--data", "digits", "--name", "a"],
        ["leave", "{folder}", "nobody"],
        ["leave", "nowhere", "a"],
        ["status", "nowhere"],
        ["run", "nowhere"],
    ],
    ids=" ".join,
)
def test_what_was_given_wrongly_is_said_without_torch(words, federation):
    words = [word.format(folder=federation) for word in words]
    assert "torch" not in imported_by("federate", *words, code=2)


def test_the_look_for_heavy_imports_sees_them():
    assert {"torch", "numpy"} <= imported_by("methods", "--help")


def test_import_apfl_imports_nothing_heavy():
    code = f"import sys, apfl; print(*(name for name in {HEAVY!r} if name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


@pytest.mark.parametrize("group", [Commands, Federate])
def test_the_list_says_what_each_command_says(group: type[LazyGroup]):
    made = typer.main.get_command(app) if group is Commands else typer.main.get_command(app).commands["federate"]
    assert list(made.commands) == list(group.homes)
    for name, command in made.commands.items():
        assert command.name == name
        assert _described(name, group.homes[name]).help == command.help


def test_unknown_commands_are_refused(capsys):
    from tests.commands import here

    assert here("rum") == 2
    assert "run" in capsys.readouterr().err


def completed(words: str, shell: str = "bash") -> str:
    """What a shell is told to offer after ``words``."""
    here = {"_APFL_COMPLETE": f"complete_{shell}", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split(" ")) - 1)}
    code = [sys.executable, "-c", "from apfl.cli import main; main()"]
    return subprocess.run(code, env={**os.environ, **here}, capture_output=True, text=True).stdout


def test_a_shell_completes_commands_and_options():
    assert completed("apfl fe").split() == ["features", "federate"]
    assert completed("apfl federate st").split() == ["status"]
    assert "--client-column" in completed("apfl run --cl").split()
