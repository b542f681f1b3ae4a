"""``apfl federate`` as far as it needs no Flower: these run where the extra is not installed, too."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import tomllib
from pathlib import Path

import numpy as np
import pytest
import torch

from apfl.cli.federate import app as federate
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.flower.bundle import pyproject
from apfl.federate.flower.events import Events, in_words
from apfl.federate.flower.join import stay_connected
from apfl.federate.flower.processes import Server, is_loopback, split_address
from apfl.federate.flower.superlink import FleetOnly
from apfl.federate.inprocess import simulate
from apfl.files import is_held
from apfl.models.file import load_model
from tests.commands import here as apfl
from tests.federate.federation_toys import FIXED, NAMES, draw_shard, make_sites


@pytest.fixture
def features(tmp_path) -> Path:
    rng = np.random.default_rng(0)
    path = tmp_path / "features.npz"
    labels = np.array(["cat"] * 6 + ["dog"] * 5 + ["emu"])
    np.savez(path, features=rng.normal(size=(12, 4)), labels=labels)
    return path


@pytest.fixture
def federation(tmp_path) -> Path:
    """A federation's folder, as a server leaves it after a run."""
    simulate(make_sites(tmp_path), Terms("f", method=FIXED), tmp_path / "server")
    return tmp_path / "server"


def line(capsys) -> str:
    return " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    "words",
    [
        ["keys", "k", "--host", "h"],
        ["server", "s"],
        ["simulate"],
        ["join", "--server", "127.0.0.1:1", "--data", "digits", "--name", "a", "--yes"],
    ],
)
def test_without_the_extra_one_line_says_what_to_install(words, monkeypatch, capsys, tmp_path):
    monkeypatch.setitem(sys.modules, "flwr", None)
    monkeypatch.chdir(tmp_path)
    assert apfl("federate", *words) == 2
    assert "pip install 'apfl[flower]'" in line(capsys)
    assert not list(tmp_path.iterdir())


def test_what_leaves_is_listed_and_nothing_is_started(features, capsys):
    words = ["--server", "127.0.0.1:1", "--data", features, "--name", "a", "--show-what-leaves"]
    assert apfl("federate", "join", *words) == 0
    told = line(capsys)
    assert "cat 6, dog 5" in told
    assert "withheld: class emu" in told  # one row: it could be read off the upload
    assert "never: rows" in told


def test_another_machine_needs_certificates(features, capsys):
    assert apfl("federate", "join", "--server", "fed.example.org:9091", "--data", features, "--name", "a") == 2
    assert "give --ca ca.crt and --key a.key" in line(capsys)


def test_status_result_leave_and_forget(federation, capsys, tmp_path):
    assert apfl("federate", "status", federation, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in status["clients"]]
    assert {row["state"] for row in status["clients"]} == {"member"}
    assert apfl("federate", "status", federation) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert apfl("federate", "result", federation, "--out", tmp_path / "primary.safetensors", "--json") == 0
    assert json.loads(capsys.readouterr().out)["members"] == names
    model = load_model(tmp_path / "primary.safetensors")
    assert model.scores(torch.zeros(2, status["terms"]["n_features"])).shape == (2, 3)
    assert apfl("federate", "leave", federation, names[0], "--json") == 0
    assert json.loads(capsys.readouterr().out)["difference"] == 0.0
    assert apfl("federate", "forget", federation, names[1]) == 0
    assert names[1] in capsys.readouterr().out
    assert apfl("federate", "status", federation, "--json") == 0
    left = json.loads(capsys.readouterr().out)
    assert names[1] not in [row["name"] for row in left["clients"]]


def test_leaving_where_only_sums_are_kept_needs_the_bytes(tmp_path, capsys):
    sites = make_sites(tmp_path)
    simulate(sites, Terms("f", method=FIXED, keep_contributions=False), tmp_path / "server")
    (kept,) = tmp_path.rglob(f"{sites[0].name}/sent-*.safetensors")
    words = ["federate", "leave", tmp_path / "server", sites[0].name, "--json", "--contribution", kept]
    assert apfl(*words) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["difference"] is None
    assert told["residual"] < 1e-9


def test_terms_stay_as_they_were_agreed(tmp_path):
    from apfl.cli.federate import _agree

    agreed = _agree(tmp_path / "three", None, {"quorum": 3, "method": {"d_primary": "64"}})
    assert (agreed.federation, agreed.quorum, agreed.method.d_primary) == ("three", 3, 64)
    assert _agree(tmp_path / "three", None, {}) == agreed
    assert _agree(tmp_path / "three", None, {"quorum": 3}) == agreed
    with pytest.raises(InputError, match="other terms"):
        _agree(tmp_path / "three", None, {"quorum": 2})


@pytest.mark.parametrize("name", ["bad name!", "zürich", "-a", "_a", "a" * 65, ""])
def test_no_key_for_a_name_that_no_federation_admits(name, tmp_path, capsys, monkeypatch):
    """`keys` took letters of any alphabet, any first letter but a dot, and any length."""
    monkeypatch.setitem(sys.modules, "flwr", sys)  # as if installed
    with pytest.raises(InputError) as refused:
        Site(tmp_path / "site", name, draw_shard(10, 0), NAMES)
    assert apfl("federate", "keys", tmp_path / "keys", f"--site={name}") == 2
    assert " ".join(str(refused.value).split()) in line(capsys)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "words",
    [["run", "s", "--predict"], ["join", "--server", "127.0.0.1:1", "--data", "x", "--name", "a", "--predict", "y"]],
)
def test_a_server_does_not_have_sites_predict(words, capsys):
    assert apfl("federate", *words) == 2
    assert "apfl predict FOLDER/FEDERATION/NAME/model.safetensors FILE" in line(capsys)


def test_defaults_have_one_home():
    """The command line, the app that `flwr run` takes and the server's own processes wait equally long."""
    defaults = {
        (command.name or command.callback.__name__, name): parameter.default
        for command in federate.registered_commands
        for name, parameter in inspect.signature(command.callback).parameters.items()
    }
    assert defaults["run", "deadline"] == tomllib.loads(pyproject())["tool"]["flwr"]["app"]["config"]["deadline"]
    assert defaults["server", "port"] == Server(Path()).port
    assert defaults["join", "patience"] == inspect.signature(stay_connected).parameters["patience"].default


def test_no_server_was_started_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", sys)  # as if installed
    assert apfl("federate", "run", tmp_path) == 2
    assert "first: apfl federate server" in line(capsys)


def ask(client: str, server: str, path: str) -> int:
    """The status that a request gets through the guard."""
    got: list[int] = []

    async def inner(scope, receive, send):
        got.append(200)

    async def send(message):
        if "status" in message:
            got.append(message["status"])

    scope = {"type": "http", "path": path, "client": (client, 5), "server": (server, 9091)}
    asyncio.run(FleetOnly(inner)(scope, None, send))
    return got[0]


def test_other_machines_reach_the_fleet_alone():
    assert ask("10.0.0.7", "10.0.0.1", "/v1/fleet/pull-messages") == 200
    assert ask("10.0.0.7", "10.0.0.1", "/health") == 200
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleetx", "/"):
        assert ask("10.0.0.7", "10.0.0.1", path) == 403
        assert ask("127.0.0.1", "127.0.0.1", path) == 200
        assert ask("10.0.0.1", "10.0.0.1", path) == 200  # the server's own processes, when it listens on one address


def test_addresses():
    assert split_address("[::1]:80") == ("::1", 80)
    for wrong in ("host", "host:", ":80", "host:x", "host:70000"):
        with pytest.raises(InputError, match="expected HOST:PORT"):
            split_address(wrong)
    assert [is_loopback(host) for host in ("::1", "10.0.0.1", "localhost")] == [True, False, True]
    assert Server(Path("f"), "0.0.0.0", 9).address == "127.0.0.1:9"


def test_events_are_read_whole(tmp_path):
    events = Events(tmp_path, "7")
    events("asked", client="a", phase="table")
    with events.path.open("ab") as file:
        file.write(b'{"half')
    (position, event), *more = Events.read(events.path)
    assert not more
    assert in_words(event).split() == ["asked", "a", "phase", "table"]
    assert not list(Events.read(events.path, position))


def test_a_run_that_is_alive_holds_the_ledger(tmp_path):
    assert not is_held(tmp_path / "lock")
    with Coordinator(tmp_path, Terms("f", method=FIXED)):
        assert is_held(tmp_path / "lock")
    assert not is_held(tmp_path / "lock")


@pytest.mark.parametrize("kept", ["ca.crt", "ca.key"])
def test_half_an_authority_is_not_made_whole_silently(kept, tmp_path):
    from apfl.federate.flower.keys import make_certificates

    (tmp_path / kept).write_text("as it was")
    with pytest.raises(InputError, match="put it back"):
        make_certificates(tmp_path, ["fed.example.org"])
    assert [path.name for path in tmp_path.iterdir()] == [kept]
    assert (tmp_path / kept).read_text() == "as it was"
