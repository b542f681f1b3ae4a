"""``apfl federate`` as far as it needs no Flower: these run where the extra is not installed, too."""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import os
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from apfl.cli.app import Federate
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.flower.bundle import pyproject
from apfl.federate.flower.events import Events, in_words
from apfl.federate.flower.join import stay_connected
from apfl.federate.flower.peers import OWN
from apfl.federate.flower.processes import Server, is_loopback, split_address
from apfl.federate.flower.superlink import FleetOnly, paths_for_others
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


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            ["--ca", "ca.crt"],
            "--ca given without --key a.key: a server that has certificates admits sites by their keys",
        ),
        (["--key", "a.key"], "--key given without --ca ca.crt: a server that has certificates"),
    ],
)
@pytest.mark.parametrize("server", ["127.0.0.1:1", "fed.example.org:9091"])
def test_a_certificate_and_a_key_go_together(features, capsys, server, words, says):
    assert apfl("federate", "join", "--server", server, "--data", features, "--name", "a", "--yes", *words) == 2
    assert says in " ".join(line(capsys).split())


def test_status_result_leave_and_forget(federation, capsys, tmp_path):
    assert apfl("federate", "status", federation, "--json") == 0
    status = json.loads(capsys.readouterr().out)
    names = [row["name"] for row in status["clients"]]
    assert {row["state"] for row in status["clients"]} == {"member"}
    assert apfl("federate", "status", federation) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names)
    assert apfl("federate", "result", federation, "--out", tmp_path / "primary.safetensors", "--json") == 0
    assert (tmp_path / "primary.safetensors").stat().st_mode & 0o077 == 0
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


def test_leaving_prints_the_evidence_in_words_and_nothing_else(federation):
    words = [sys.executable, "-m", "apfl", "federate", "leave", str(federation), "site-0"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("site-0 left (")
    assert done.stderr == ""  # not the events of the ledger, which are JSON


@pytest.mark.parametrize(("word", "kept"), [("leave", ["site-0.pub.left"]), ("forget", [])])
def test_the_key_of_who_left_is_set_aside_and_that_of_who_is_forgotten_removed(word, kept, federation):
    pytest.importorskip("flwr")
    for name in ("keys", "flower"):
        (federation / name).mkdir()
    (federation / "keys" / "site-0.pub").touch()
    (federation / "flower" / "server.json").write_text(json.dumps({"host": "127.0.0.1", "port": 1, "secure": True}))
    assert apfl("federate", word, federation, "site-0") == 0
    assert [path.name for path in (federation / "keys").iterdir()] == kept


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
        (command, name): parameter.default
        for command, home in Federate.homes.items()
        for name, parameter in inspect.signature(getattr(import_module(str(home)), command)).parameters.items()
    }
    assert defaults["run", "deadline"] == tomllib.loads(pyproject())["tool"]["flwr"]["app"]["config"]["deadline"]
    assert defaults["server", "port"] == Server(Path()).port
    assert defaults["join", "patience"] == inspect.signature(stay_connected).parameters["patience"].default


def test_no_server_was_started_there(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", sys)  # as if installed
    assert apfl("federate", "run", tmp_path) == 2
    assert "first: apfl federate server" in line(capsys)


def ask(own: bool, path: str, *paths: tuple[str, ...]) -> int:
    """The status that a request gets through the guard."""
    got: list[int] = []

    async def inner(scope, receive, send):
        got.append(200)

    async def send(message):
        if "status" in message:
            got.append(message["status"])

    scope = {"type": "http", "path": path, "state": {OWN: own}}
    asyncio.run(FleetOnly(inner, *paths)(scope, None, send))
    return got[0]


def test_others_reach_the_fleet_alone():
    for path in ("/v1/fleet/pull-messages", "/health"):
        assert ask(False, path) == ask(True, path) == 200
    for path in ("/v1/control/start-run", "/v1/runtime/acquire-task", "/docs", "/v1/fleetx", "/"):
        assert ask(False, path) == 403
        assert ask(True, path) == 200


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--host", "127.0.0.1", "--insecure"], 403),
        (["--host", "::1", "--insecure"], 403),
        (["--host", "0.0.0.0", "--insecure"], 200),  # whoever runs the server said so, and was warned
        (["--host", "127.0.0.1", "--enable-supernode-auth"], 200),  # they have keys
        (["--insecure"], 200),
    ],
)
def test_without_keys_on_loopback_no_other_user_takes_part(words, status):
    """Any user of the machine could join, and be sent what the others made."""
    assert ask(False, "/v1/fleet/activate-node", paths_for_others(words)) == status
    assert ask(True, "/v1/fleet/activate-node", paths_for_others(words)) == 200


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


def test_join_leaves_the_defaults_of_the_split_to_the_site(features, tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    configs = []
    monkeypatch.setattr("apfl.cli.site.stay_connected", lambda connection, *_: configs.append(connection.config))
    monkeypatch.setattr("apfl.cli.site.end_as_interrupted", lambda: None)
    join = ("federate", "join", "--server", "127.0.0.1:1", "--data", features, "--name", "a", "--yes", "--folder")
    assert apfl(*join, tmp_path / "all") == 0
    assert apfl(*join, tmp_path / "some", "--test-fraction", "0.25") == 0
    assert "test-fraction" not in configs[0]
    assert configs[1]["test-fraction"] == 0.25


def a_table(path: Path) -> Path:
    rows = "".join(f"{'xy'[i % 2]},{i % 7},{i % 5 / 2},{7 * (i % 3)},{i}\n" for i in range(60))
    path.write_text("my class,age,lab a,ward,weight\n" + rows)
    return path


def test_join_reads_a_table_as_it_is_told_to(tmp_path, monkeypatch, capsys):
    """The options go through Flower's configuration to the process that answers the server."""
    pytest.importorskip("flwr")
    from flwr.common.config import parse_config_args

    from apfl.federate.flower.client_app import _site

    connections = []
    monkeypatch.setattr("apfl.cli.site.stay_connected", lambda connection, *_: connections.append(connection))
    monkeypatch.setattr("apfl.cli.site.end_as_interrupted", lambda: None)
    join = ("federate", "join", "--server", "127.0.0.1:1", "--name", "a", "--yes", "--folder", tmp_path / "a")
    data = ("--data", a_table(tmp_path / "rows.csv"), "--label-column", "my class")
    assert apfl(*join, *data, "--features", "lab *,age,ward", "--drop", "age", "--group-column", "ward") == 0
    assert "a: features: lab a; all sites must have the same, in this order" in " ".join(
        capsys.readouterr().err.split()
    )
    site = _site(parse_config_args([connections[0].command()[-1]]), "a")
    assert site.train.features.flatten().tolist() == [i % 5 / 2 for i in range(60)]
    assert site.class_names == ("x", "y")
    assert site.about == {"client": "a", "feature_names": ["lab a"]}
    assert apfl(*join, *data, "--drop", 'a"b') == 2
    assert "no quotes are allowed" in capsys.readouterr().err


def test_simulate_takes_its_sites_from_a_column(tmp_path, monkeypatch, capsys):
    """Each value of the column is a site, and the quorum is all of them; the column is no feature."""
    pytest.importorskip("flwr")
    monkeypatch.setattr("flwr.simulation.run_simulation", lambda *_, **__: None)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    quiet = SimpleNamespace(getLogger=logging.Logger, ERROR=logging.ERROR)  # the levels of other tests stay
    monkeypatch.setattr("apfl.federate.flower.simulate.logging", quiet)
    data = ("--data", a_table(tmp_path / "rows.csv"), "--label-column", "my class", "--client-column", "ward")
    assert apfl("federate", "simulate", *data, "--out", tmp_path / "f") == 0
    assert "sites: site-000 is 0, site-001 is 7, site-002 is 14" in capsys.readouterr().out
    for number in range(3):
        with np.load(tmp_path / "f" / "sites" / f"site-00{number}" / "features.npz") as rows:
            assert sorted(rows["features"][:, 2].tolist()) == list(range(number, 60, 3))
            assert rows["features"].shape == (20, 3)
    with Coordinator(tmp_path / "f") as coordinator:
        assert coordinator.draft.quorum == 3


# ------------------------------------------------------------------------------------------- masks between machines


def test_a_server_between_machines_has_masked_terms_unless_it_is_told_otherwise(tmp_path, monkeypatch, capsys):
    pytest.importorskip("flwr")
    from apfl.cli import federate

    for words in (["--host", "0.0.0.0"], ["--secure", "--classes", "a,b"], ["--masked", "--n-features", "3"]):
        assert apfl("federate", "server", tmp_path / "f", *words) == 2
        told = line(capsys)
        assert "sees sums over sites only" in told
        assert "With --plain it sees what each site sends, from which its rows can often be recovered" in told
        assert ("--classes" in told) == ("--classes" not in words)
        assert not (tmp_path / "f").exists()
    names = tmp_path / "classes.txt"
    names.write_text("ant\nbee, the\n\n")
    given = {"class_names": federate._names(str(names)), "n_features": 3}
    masked = federate._agree(tmp_path / "masked", None, dict(given), masked=True)
    assert (masked.masked, masked.class_names, masked.max_share) == (True, ("ant", "bee, the"), 1.0)
    assert (masked.method.map, masked.method.normalise) == ("landmarks", "auto")  # a pilot works under masks
    assert federate._agree(tmp_path / "masked", None, dict(given), masked=True) == masked  # started again
    plain = federate._agree(tmp_path / "plain", None, {"masked": False}, masked=True)
    assert (plain.masked, plain.max_share) == (False, 0.5)
    assert not federate._agree(tmp_path / "loopback", None, {}).masked
    where = Server(tmp_path / "masked")
    assert "nothing of a single one. First: apfl federate roster" in federate._what_it_sees(where, {"masked": True})
    assert federate._what_it_sees(where, {}).startswith("plain: this server sees what each site sends, from which")


def test_join_confirms_the_roster_by_its_fingerprint(tmp_path, features, monkeypatch, capsys):
    pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")
    from apfl.federate.masked.rosters import collect, make_identity, write_roster

    for name in "abc":
        make_identity(tmp_path / "keys", name)
    roster = collect(tmp_path / "keys", set())
    write_roster(tmp_path / "roster.json", roster)
    words = [
        "federate",
        "join",
        "--server",
        "127.0.0.1:1",
        "--name",
        "a",
        "--data",
        features,
        "--folder",
        tmp_path / "a",
    ]
    words += ["--roster", tmp_path / "roster.json", "--identity", tmp_path / "keys" / "a.identity"]
    assert apfl(*words, "--show-what-leaves") == 0
    told = line(capsys)
    assert "the server learns the sum over all sites that take part" in told  # without terms: masked ones
    assert "the power of four of the largest entry of each feature over all sites" in told
    assert "a server that kept the former sum learns this site's part from the difference" in told
    assert apfl(*words, "--fingerprint", "0" * 64) == 2
    assert "this is not the roster of the other sites. Nothing was sent" in line(capsys)
    assert apfl(*words, "--fingerprint", roster.fingerprint.upper(), "--show-what-leaves") == 0
    asked = []
    monkeypatch.setattr("apfl.cli.site.need_flower", lambda: None)
    monkeypatch.setattr("typer.confirm", lambda question, err: asked.append(question))
    assert apfl(*words) == 2
    assert asked == ["Do the other sites have the same fingerprint?"]  # no, and nothing else is asked
    assert apfl(*words, "--fingerprint", roster.fingerprint) == 2
    assert asked[1:] == ["May this leave?"]
    assert apfl(*words[:10], "--fingerprint", "0" * 64) == 2
    assert "--fingerprint given without --roster" in line(capsys)


def test_a_masked_site_that_left_is_told_what_the_difference_tells(tmp_path):
    from apfl.federate.flower.join import Connection, _left

    told = [str(_left(Connection(tmp_path, "a", "", "h:1", config=config))) for config in ({}, {"roster": "r"})]
    assert told[1].startswith(told[0])
    assert told[1].endswith("learns this site's part from the difference to the new one.")
