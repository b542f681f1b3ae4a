"""Masked sums as questions of a run, with Flower's own messages and the sites' own handlers, in one process."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.contribution import decode
from apfl.federate.masked.rosters import collect, make_identity, read_identity, read_roster, rosters_of, write_roster
from apfl.federate.masked.tables import summed
from apfl.federate.secure import PHASES, Roster, new_key, verifying_key
from apfl.models.file import read
from tests.federate.federation_toys import NAMES, draw_shard
from tests.federate.masked.toys import METHOD, masked_terms

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from flwr.app import Context, Error, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from apfl.federate.flower.client_app import Limits, app
from apfl.federate.flower.conversation import Policy
from apfl.federate.flower.events import Events
from apfl.federate.flower.masked import MaskedConversation
from apfl.federate.flower.wire import parts
from tests.federate.test_conversation import RUN, as_sent, identity  # noqa: F401  # a fixture

ROOT = Path(__file__).parents[3]
SIZES = {1: 60, 2: 70, 3: 60, 4: 50}
FIXED = replace(METHOD, gamma=1.0, beta=1.0, balance=0.5, tau=0.0, weight=1.0, landmarks="free")
Fate = Callable[[str, str, int], str]  # sum, phase, node -> "", "dies", or "fails": once, the connection breaks


class Grid:
    """Sites by their node's number. One that dies is gone for good; messages are as Flower sends them."""

    def __init__(self, folder: Path, nodes: Iterable[int], fate: Fate = lambda *_: "") -> None:
        self.folder, self.nodes, self.fate = folder, list(nodes), fate
        self.replies: dict[str, tuple[str, dict[str, bytes]]] = {}
        self.failed: set[tuple[str, int]] = set()
        for node in self.nodes:
            home, rows = folder / str(node), draw_shard(SIZES[node], node)
            home.mkdir(exist_ok=True)
            features, labels = rows.features.numpy(), rows.labels.numpy()
            test = np.arange(len(labels)) % 4 == 0
            np.savez(home / "rows.npz", features=features, labels=labels, class_names=np.array(NAMES), test=test)

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=node, name=f"site-{node}") for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        node, name = message.metadata.dst_node_id, str(len(self.replies))
        message.metadata.__dict__["_message_id"] = name
        group = message.metadata.group_id
        fate = self.fate(*group.partition(" ")[::2], node)
        if fate == "dies":
            self.nodes.remove(node)
            return [""]
        if fate == "fails" and (group, node) not in self.failed:
            self.failed.add((group, node))
            self.answered(message, node)  # and then the connection breaks
            self.replies[name] = as_sent(Message(Error(code=5, reason="broken"), reply_to=message))
            return [name]
        self.replies[name] = as_sent(self.answered(message, node))
        return [name]

    def answered(self, message: Message, node: int) -> Message:
        return app(message, Context(RUN, node, self.config(node), RecordDict(), {}))

    def config(self, node: int) -> dict[str, object]:
        home, keys = self.folder / str(node), self.folder / "server" / "keys"
        config = {"name": f"site-{node}", "folder": str(home), "data": str(home / "rows.npz"), "test-column": "test"}
        config |= {
            "roster": str(self.roster(node)),
            "identity": str(keys / f"site-{node}.identity"),
            "report": node != 2,
        }
        return config

    def roster(self, node: int) -> Path:
        rosters = sorted((self.folder / "server" / "rosters").glob("*.json"))
        return next(path for path in rosters if f"site-{node}" in read_roster(path).names)

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        replies = [inflate_object_from_contents(*self.replies[name]) for name in names]
        for reply in replies:
            reply.metadata.__dict__["_message_id"] = "as Flower's grid does"
        return replies


@pytest.fixture(autouse=True)
def hurry(monkeypatch):
    monkeypatch.setattr("apfl.federate.flower.masked.AGAIN", 0.0)
    monkeypatch.setattr("apfl.federate.flower.masked.GONE", 5.0)
    monkeypatch.setattr("apfl.federate.flower.masked.PAUSE", 0.01)


def prepare(folder: Path, nodes: Iterable[int]) -> None:
    """Keys, identities and a roster of these sites."""
    keys = folder / "server" / "keys"
    before = {name for roster in rosters_of(folder / "server") for name in roster.names}
    for node in nodes:
        make_identity(keys, f"site-{node}")
        (keys / f"site-{node}.pub").touch()
    number = len(rosters_of(folder / "server")) + 1
    write_roster(folder / "server" / "rosters" / f"{number:03d}.json", collect(keys, before))


def run(folder: Path, grid: Grid, terms: Terms | None = None, *, evaluate: bool = False) -> list[dict]:
    """A run to its end; its events."""
    with Coordinator(folder / "server", terms) as coordinator:
        events = Events(folder / "server", str(RUN))
        before = len(events.path.read_text().splitlines()) if events.path.exists() else 0
        policy = Policy(deadline=600.0, evaluate=evaluate)  # nobody waits for it
        assert MaskedConversation(grid, coordinator, policy, events, folder / "server").run()
    return [json.loads(line) for line in events.path.read_text().splitlines()[before:]]


def own_integers(folder: Path, node: int, terms: Terms) -> np.ndarray:
    site = Site.from_file(folder / str(node), f"site-{node}", str(folder / str(node) / "rows.npz"), test_column="test")
    return decode(site.own_statistics(terms), terms).integers


def seen(events: list[dict], event: str) -> list[dict]:
    return [each for each in events if each["event"] == event]


def test_a_run_of_all_sums_with_broken_connections(tmp_path):
    """A site whose connection breaks after each answer answers again, with the same bytes. All messages are masked."""
    nodes = (1, 2, 3)
    prepare(tmp_path, nodes)
    grid = Grid(tmp_path, nodes, lambda what, phase, node: "fails" if node == 3 and what == "statistics" else "")
    sent: list[Message] = []
    grid.answered = lambda message, node: sent.append(message) or Grid.answered(grid, message, node)
    events = run(tmp_path, grid, masked_terms(replace(METHOD, d_primary=24)), evaluate=True)
    sums = [event["sum"] for event in seen(events, "summed")]
    assert sums == ["count", "spread", "statistics", "table", "metrics"]
    assert {message.metadata.message_type for message in sent} == {"train.masked", "train.refine"}
    names = [f"site-{node}" for node in nodes]
    assert all(event["members"] == names for event in seen(events, "summed"))
    assert len(seen(events, "failed")) == 5
    with Coordinator(tmp_path / "server") as server:
        expected = sum(own_integers(tmp_path, node, server.terms) for node in nodes)
        np.testing.assert_array_equal(server.pool.running().vector, expected)
        ((right, n_test, reports),) = summed(server.ledger, "metrics", 1).values()
        assert (n_test, reports) == (15 + 15, 2)  # site-2 does not report
        assert 0 < right <= n_test
        assert server.ledger.confirmed(1) == set(names)
    assert len(list(tmp_path.rglob("model.safetensors"))) == 3
    # The ledger has it all: another run asks for nothing.
    assert not seen(run(tmp_path, Grid(tmp_path, nodes), evaluate=True), "asked")
    # A site that joined without a roster does not take part in a masked federation.
    grid.config = lambda node: Grid.config(grid, node) | {"roster": "", "identity": ""}
    (tmp_path / "1" / "instructions.json").unlink()
    settings, payloads = parts(Grid.answered(grid, sent[0], 1))
    assert "are masked: join with --roster and --identity" in settings["failed"]
    assert not payloads


@pytest.mark.slow
def test_a_pilot_over_flower_with_a_site_that_dies_in_it(tmp_path):
    """The terms state no rows and no normalisation: both come from sums."""
    prepare(tmp_path, SIZES)
    grid = Grid(tmp_path, SIZES, lambda *now: "dies" if now == ("hits", "mask", 2) else "")
    method = replace(FIXED, d_primary=24, normalise="auto")
    events = run(tmp_path, grid, masked_terms(method, max_rows=None))
    sums = {event["sum"]: event["members"] for event in seen(events, "summed")}
    assert list(sums) == ["count", "moments", "pilot", "hits", "statistics"]
    assert [len(members) for members in sums.values()] == [4, 4, 4, 3, 3]
    with Coordinator(tmp_path / "server") as server:
        assert server.terms.method.normalise == "columns"
        assert server.terms.most_rows == 63
        expected = sum(own_integers(tmp_path, node, server.terms) for node in (1, 3, 4))
        np.testing.assert_array_equal(server.pool.running().vector, expected)
    assert not seen(run(tmp_path, Grid(tmp_path, (1, 3, 4))), "asked")


@pytest.mark.slow
def test_a_site_that_dies_in_the_middle_costs_its_contribution(tmp_path):
    prepare(tmp_path, SIZES)
    end = ("statistics", "mask", 2)
    grid = Grid(tmp_path, SIZES, lambda *now: "dies" if now == end else "")
    events = run(tmp_path, grid, masked_terms(replace(FIXED, d_primary=24)))
    assert [event["members"] for event in seen(events, "published")] == [["site-1", "site-3", "site-4"]]
    with Coordinator(tmp_path / "server") as server:
        expected = sum(own_integers(tmp_path, node, server.terms) for node in (1, 3, 4))
        np.testing.assert_array_equal(server.pool.running().vector, expected)
    # When it comes back, it gets a model, and is asked for no statistics: alone they could be told.
    events = run(tmp_path, Grid(tmp_path, SIZES))
    assert {event["client"] for event in seen(events, "asked") if event["phase"] == "refine 1"} == {"site-2"}
    assert not [event for event in seen(events, "asked") if "statistics" in event["phase"]]
    assert read(next((tmp_path / "2").rglob("model.safetensors"))).settings["publication"] == 1


class KillingGrid(Grid):
    """A victim answers in processes of its own, and each question kills the first of them."""

    def __init__(self, folder: Path, nodes: Iterable[int], victim: int) -> None:
        super().__init__(folder, nodes, lambda what, phase, node: "fails" if node == victim else "")
        self.victim, self.killed = victim, []

    def answered(self, message: Message, node: int) -> Message:
        if node != self.victim:
            return super().answered(message, node)
        root, contents = as_sent(message)
        told = {
            "root": root, "parts": {key: part.hex() for key, part in contents.items()}, "config": self.config(node),
            "id": message.metadata.message_id,
        }  # fmt: skip
        (self.folder / "message.json").write_text(json.dumps(told))
        command = [sys.executable, "-m", "tests.federate.masked.killed_site", str(self.folder), str(node)]
        first = (message.metadata.group_id, node) in self.failed and message.metadata.group_id not in self.killed
        if first:  # before the connection breaks: its state is written, its answer is not
            self.killed.append(message.metadata.group_id)
        done = subprocess.run(command + ["kill"] * first, cwd=ROOT, capture_output=True, timeout=120, check=False)
        if first and "refine" not in message.metadata.group_id:
            assert done.returncode == -signal.SIGKILL, done.stderr
            return message
        assert done.returncode == 0, done.stderr
        answer = json.loads((self.folder / "answer.json").read_text())
        contents = {key: bytes.fromhex(part) for key, part in answer["parts"].items()}
        return inflate_object_from_contents(answer["root"], contents)


@pytest.mark.slow
def test_a_site_whose_process_is_killed_in_every_phase_of_every_sum_costs_nothing(tmp_path, monkeypatch):
    """Real processes, SIGKILL after the state is on disk and before the answer is sent; the next one goes on."""
    monkeypatch.setattr("apfl.federate.flower.masked.GONE", 300.0)  # a process takes seconds to start
    nodes = (1, 2, 3)
    prepare(tmp_path, nodes)
    grid = KillingGrid(tmp_path, nodes, victim=2)
    events = run(tmp_path, grid, masked_terms(replace(FIXED, d_primary=24)))
    sums = [event["sum"] for event in seen(events, "summed")]
    assert sums == ["count", "statistics"]
    assert set(grid.killed) >= {f"{what} {phase}" for what in sums for phase in PHASES}
    assert all(event["members"] == [f"site-{node}" for node in nodes] for event in seen(events, "summed"))
    with Coordinator(tmp_path / "server") as server:
        expected = sum(own_integers(tmp_path, node, server.terms) for node in nodes)
        np.testing.assert_array_equal(server.pool.running().vector, expected)


@pytest.mark.slow
def test_below_the_threshold_the_run_says_so_and_the_next_one_succeeds(tmp_path):
    prepare(tmp_path, SIZES)
    dying = Grid(tmp_path, SIZES, lambda what, phase, node: "dies" if phase == "mask" and node in (1, 2) else "")
    with pytest.raises(InputError, match="2 of 4 members are left and 3 are needed; nothing is unmasked"):
        run(tmp_path, dying, masked_terms(replace(FIXED, d_primary=24)))
    events = run(tmp_path, Grid(tmp_path, SIZES))
    assert [event["sum"] for event in seen(events, "summed")] == ["count", "statistics"]


def test_a_site_with_a_roster_obeys_no_terms_without_masks():
    limits, terms = Limits({"roster": "roster.json"}), masked_terms()
    limits.check_masks(terms)
    for check in (limits.check_masks, lambda plain: limits.check(plain.to_json().encode())):
        with pytest.raises(InputError, match="have no masks: join without --roster"):
            check(replace(terms, masked=False))
    with pytest.raises(InputError, match="are masked: join with --roster"):
        Limits({}).check_masks(terms)


def test_without_a_roster_a_run_says_how_to_make_one(tmp_path):
    (tmp_path / "server").mkdir()
    with pytest.raises(InputError, match="has no roster yet; make one: apfl federate roster"):
        run(tmp_path, Grid(tmp_path, ()), masked_terms())


# -------------------------------------------------------------------------------------------------- files of rosters


def test_identities_and_rosters_as_files(tmp_path):
    private, public = make_identity(tmp_path, "north")
    assert private.stat().st_mode & 0o077 == 0
    assert len(read_identity(private)) == 32
    assert private.read_bytes() != public.read_bytes()
    with pytest.raises(InputError, match="exists; rosters name it"):
        make_identity(tmp_path, "north")
    with pytest.raises(InputError, match=r"1 sites in .* are on no roster yet"):
        collect(tmp_path, set())
    make_identity(tmp_path, "south")
    made = collect(tmp_path, set())
    write_roster(tmp_path / "rosters" / "001.json", made)
    (kept,) = rosters_of(tmp_path)
    assert kept == made == read_roster(tmp_path / "rosters" / "001.json")
    for text in ("", "[]", '{"a": 1}', '{"a": "00", "b": "11"}', "{" * 10_000):
        (tmp_path / "bad.json").write_text(text)
        with pytest.raises(InputError, match=r"no roster|not a name with a key|2 to"):
            read_roster(tmp_path / "bad.json")
    private.write_text("00")
    with pytest.raises(InputError, match="no key of 32 bytes"):
        read_identity(private)


def test_a_changed_roster_is_refused_or_another_roster(tmp_path):
    """Of 300 files with a changed byte: those that are read have another fingerprint, by which sites confirm them."""
    path, rng, accepted = tmp_path / "roster.json", random.Random(0), 0
    roster = Roster({name: verifying_key(new_key()) for name in ("north", "south", "west")})
    write_roster(path, roster)
    data = path.read_bytes()
    for _ in range(300):
        changed = bytearray(data)
        changed[rng.randrange(len(changed))] = rng.randrange(256)
        path.write_bytes(changed)
        try:
            told = read_roster(path)
        except InputError:
            continue
        accepted += told.keys != roster.keys
        assert (told.fingerprint == roster.fingerprint) == (told.keys == roster.keys)
    assert 5 < accepted < 150  # another digit of a key, another letter of a name
