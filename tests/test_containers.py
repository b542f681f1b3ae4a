"""Image and compose file, without an engine: who runs, what is copied, and that commands and options exist."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from typer.main import get_command

from apfl.cli.app import app
from apfl.federate.flower.health import PORT, listens, runs
from apfl.federate.flower.processes import Server

ROOT = Path(__file__).parents[1]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
yaml = pytest.importorskip("yaml", reason="needs PyYAML, which comes with the docs")
COMPOSE = yaml.safe_load((ROOT / "compose.yaml").read_text())
SITES = ["site-a", "site-b", "site-c"]
SERVED = ["server", *SITES]


def instructions(name: str) -> list[str]:
    joined = DOCKERFILE.replace("\\\n", " ")
    return [line.split(None, 1)[1] for line in joined.splitlines() if line.startswith(f"{name} ")]


def refused(words: list[str]) -> list[str]:
    """The words of a command of apfl that it does not have."""
    command = get_command(app)
    while getattr(command, "commands", None):
        command = command.commands[words.pop(0)]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)}
    return [word for word in words if word.startswith("--") and word not in known]


def test_the_image_runs_as_nobody_in_particular_and_reports_its_health():
    assert instructions("USER") == ["10001:10001"]
    assert DOCKERFILE.index("\nUSER ") > DOCKERFILE.index("AS build"), "in the stage that runs"
    assert "apfl.federate.flower.health" in instructions("HEALTHCHECK")[0]
    assert instructions("ENTRYPOINT") == ['["apfl"]']


def test_the_base_is_pinned_and_nothing_but_sources_is_copied():
    assert all(re.match(r"python:3\.\d+\.\d+-slim-\w+( AS \w+)?$", each) for each in instructions("FROM"))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[1] == "*", "everything is left out but what is named"
    named = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    copied = {word for each in instructions("COPY") if "--from" not in each for word in each.split()[:-1]}
    assert copied == named
    assert all((ROOT / name).exists() for name in named)


@pytest.mark.parametrize("service", SERVED)
def test_compose_calls_commands_and_options_that_there_are(service):
    assert refused(shlex.split(COMPOSE["services"][service]["command"])) == []
    assert refused(["federate", "join", "--no-such-option"]) == ["--no-such-option"]


@pytest.mark.parametrize("service", SERVED)
def test_services_can_do_no_more_than_they_must(service):
    given = COMPOSE["services"][service]
    assert given["read_only"] is True
    assert given["cap_drop"] == ["ALL"]
    assert given["security_opt"] == ["no-new-privileges:true"]
    assert "ports" not in given
    assert "privileged" not in given


@pytest.mark.parametrize("site", SITES)
def test_a_site_sees_its_own_rows_and_key_only(site):
    mounts = COMPOSE["services"][site]["volumes"]
    assert [each for each in mounts if each.startswith("./")] == [f"./data/{site}.npz:/data/{site}.npz:ro"]
    assert [each.partition(":")[0] for each in mounts if not each.startswith("./")] == [site]
    words = shlex.split(COMPOSE["services"][site]["command"])
    assert words[words.index("--name") + 1] == site
    assert words[words.index("--key") + 1].endswith(f"/{site}.key")
    made = COMPOSE["services"]["keys"]["command"][0]
    assert f"--site {site}" in made


def test_all_volumes_are_declared_and_the_ports_agree():
    used = {each.partition(":")[0] for given in COMPOSE["services"].values() for each in given["volumes"]}
    assert {name for name in used if not name.startswith("./")} == set(COMPOSE["volumes"])
    assert Server(Path()).port == PORT
    assert instructions("EXPOSE") == [str(PORT)]
    assert all(f"--server server:{PORT}" in COMPOSE["services"][site]["command"] for site in SITES)


def test_health_knows_a_port_and_a_process():
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
        assert not listens(port)
        server.listen()
        assert listens(port)
    mark = f"mark-{os.getpid()}"
    assert not runs(f"{mark}-nobody".encode())
    code = "import sys; print('here', flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", code, mark], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None
        process.stdout.readline()  # the kernel shows a command line only some time after Popen has returned
        assert runs(mark.encode())
    finally:
        process.communicate()


def test_hadolint_finds_nothing():
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        pytest.skip("needs hadolint: pip install 'apfl[dev]'")
    done = subprocess.run([program, str(ROOT / "Dockerfile")], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")
