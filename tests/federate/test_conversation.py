"""A whole run in one process, with Flower's own messages: honest sites, and one that answers rubbish."""

from __future__ import annotations

import io
import json
import sqlite3
import tracemalloc
from collections.abc import Callable, Iterable
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rich.console import Console

from apfl.cli import main
from apfl.errors import InputError
from apfl.federate import Coordinator, Terms
from apfl.federate.messages import seal_description
from apfl.federate.status import status_of
from apfl.federate.terms import Description
from apfl.federate.wire import seal
from apfl.maths.wire import ECHO_BYTES
from apfl.report.status import status_view
from tests.federate.federation_toys import FIXED, NAMES, draw_shard

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message.arraychunk import ArrayChunk
from flwr.supercore.inflatable.inflatable_object import InflatableObject, get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

from apfl.federate.flower.client_app import app
from apfl.federate.flower.conversation import Conversation, Policy
from apfl.federate.flower.events import Events, in_words
from apfl.federate.flower.fleet import largest_reply
from apfl.federate.flower.processes import last_lines
from apfl.federate.flower.telling import MARK
from apfl.federate.flower.wire import content, parts, pulled, reason

RUN, MALLORY = 17, 3
Rubbish = Callable[[Message], tuple[str, dict[str, bytes]]]  # of a reply: its root, and the bytes of all its objects


def as_sent(reply: Message) -> tuple[str, dict[str, bytes]]:
    return reply.object_id, {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}


class Grid:
    """Nodes 1 and 2 are honest sites, node 3 is Mallory's; replies are taken apart as Flower's grid does it."""

    def __init__(self, folder: Path, rubbish: Rubbish, named: bool) -> None:
        self.folder, self.rubbish, self.named = folder, rubbish, named
        self.replies: dict[str, tuple[str, dict[str, bytes]]] = {}
        for node in (1, 2):
            rows = draw_shard(30 + node, node)
            (folder / str(node)).mkdir()
            np.savez(
                folder / str(node) / "rows.npz", features=rows.features.numpy(), labels=rows.labels.numpy(),
                class_names=np.array(NAMES),
            )  # fmt: skip

    def get_nodes(self) -> list[SimpleNamespace]:
        names = {1: "site-1", 2: "site-2", MALLORY: "mallory"}
        return [SimpleNamespace(node_id=node, name=name if self.named else "") for node, name in names.items()]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        node, name = message.metadata.dst_node_id, str(len(self.replies))
        message.metadata.__dict__["_message_id"] = name
        home = self.folder / str(node)
        if node == MALLORY:
            self.replies[name] = self.rubbish(Message(content({}, {"name": "mallory"}), reply_to=message))
            return [name]
        config = {"name": f"site-{node}", "folder": str(home), "data": str(home / "rows.npz")}
        self.replies[name] = as_sent(app(message, Context(RUN, node, config, RecordDict(), {})))
        return [name]

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        replies = [inflate_object_from_contents(*self.replies[name]) for name in names]
        for reply in replies:
            reply.metadata.__dict__["_message_id"] = "as Flower's grid does"
        return replies


def run(folder: Path, rubbish: Rubbish, named: bool = True, grid: type[Grid] = Grid) -> list[dict[str, object]]:
    """A run to its end; its events."""
    (folder / "server" / "keys").mkdir(parents=True)
    for name in ("site-1", "site-2", "mallory") if named else ():
        (folder / "server" / "keys" / f"{name}.pub").touch()
    with Coordinator(folder / "server", Terms("f", method=FIXED)) as coordinator:
        events = Events(folder / "server", str(RUN))
        policy = Policy(deadline=600.0)  # nobody waits for it
        assert Conversation(grid(folder, rubbish, named), coordinator, policy, events, folder / "server").run()
    return [json.loads(line) for line in events.path.read_text().splitlines()]


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    for name, value in {"_run_id": RUN, "_node_id": 1, "_task_id": 1}.items():
        monkeypatch.setattr(TaskIdentity, name, value)
    monkeypatch.setattr("apfl.federate.flower.conversation.PAUSE", 0.01)
    monkeypatch.setattr("apfl.federate.flower.presence.LOOK", 0.0)


def test_a_site_says_that_it_took_part_and_where_its_model_is(tmp_path, capsys):
    run(tmp_path, as_sent)
    told = [line.removeprefix(MARK) for line in capsys.readouterr().out.splitlines() if line.startswith(MARK)]
    assert sum(line.startswith("takes part in f: sends its statistics, ") for line in told) == 2
    for node in (1, 2):
        (model,) = (tmp_path / str(node)).rglob("model.safetensors")
        assert f"fitted its model to publication 1 of f: {model}" in told


class Rotting(Grid):
    """A grid in whose database a bit flips, in the first statistics of site-1."""

    flipped = False

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        (name,) = super().push_messages([message])
        asked = message.metadata.message_type, message.metadata.dst_node_id
        if not self.flipped and asked == ("train.statistics", 1):
            root, objects = self.replies[name]
            largest = max(objects, key=lambda each: len(objects[each]))
            data = bytearray(objects[largest])
            data[-ECHO_BYTES - 200] ^= 1  # the last digit of a number, which no check can see
            self.replies[name] = root, {**objects, largest: bytes(data)}
            self.flipped = True
        return [name]


def test_an_answer_that_rots_in_the_database_is_asked_for_again(tmp_path, monkeypatch):
    monkeypatch.setattr("apfl.federate.flower.questions.PAUSE", 0.01)
    events = run(tmp_path, lambda reply: as_sent(reply), grid=Rotting)
    told = [
        (e["event"], e.get("outcome")) for e in events if (e.get("client"), e.get("phase")) == ("site-1", "statistics")
    ]
    assert told == [("asked", None), ("failed", None), ("asked", None), ("answered", "accepted")]
    (kept,) = (tmp_path / "1" / "f" / "site-1").glob("sent-*")
    sent = {row["name"]: row["sha256"] for row in status_of(tmp_path / "server")["clients"]}
    assert kept.name == f"sent-{sent['site-1']}.safetensors"


def with_body(kind: str, body: Callable[[bytes], bytes]) -> Rubbish:
    """Another body in the first object of a kind; its head fits."""

    def changed(reply: Message) -> tuple[str, dict[str, bytes]]:
        root, objects = as_sent(reply)
        name = next(name for name, data in objects.items() if data.startswith(kind.encode() + b" "))
        head, _, own = objects[name].partition(b"\x00")
        new = body(own)
        objects[name] = b" ".join([*head.split(b" ")[:2], str(len(new)).encode()]) + b"\x00" + new
        return root, objects

    return changed


def with_child(kind: str, child: InflatableObject) -> Rubbish:
    """Another object as the only child of the first one of a kind."""

    def changed(reply: Message) -> tuple[str, dict[str, bytes]]:
        root, objects = as_sent(reply)
        name = next(name for name, data in objects.items() if data.startswith(kind.encode() + b" "))
        head, divider, body = objects[name].partition(b"\x00")
        first, _, size = head.split(b" ")
        objects[name] = b" ".join([first, child.object_id.encode(), size]) + divider + body
        return root, objects | {child.object_id: child.deflate()}

    return changed


def with_root(data: bytes) -> Rubbish:
    return lambda reply: ("root", {"root": data})


RUBBISH: dict[str, Rubbish] = {
    "no head": with_root(b"rubbish"),
    "nothing": with_root(b""),
    "unknown class": with_root(b"Rubbish  0\x00"),
    "another class": lambda reply: ("root", {"root": ConfigRecord({}).deflate()}),
    "missing child": lambda reply: ((sent := as_sent(reply))[0], {sent[0]: sent[1][sent[0]]}),
    "its own child": with_root(b"RecordDict root 0\x00"),
    "message": with_body("Message", lambda body: b"\xff" * 64),
    "truncated message": with_body("Message", lambda body: body[:10]),
    "record dict": with_body("RecordDict", lambda body: b"\xff" * 64),
    "settings": with_body("ConfigRecord", lambda body: b"\xff" * 64),
    "payloads": with_body("ArrayRecord", lambda body: b"\xff" * 64),
    "an empty message": with_body("Message", lambda body: b""),
    "a chunk for content": with_child("Message", ArrayChunk(memoryview(b"1"))),
    "an array for content": with_child("Message", Array("uint8", (1,), "apfl", b"1")),
    "settings for content": with_child("Message", ConfigRecord({"settings": 1, "payloads": 2})),
    "other records": lambda reply: instead(reply, RecordDict({"mine": ArrayRecord()})),
    "no name": lambda reply: instead(reply, content({})),
    "a name that is none": lambda reply: instead(reply, content({}, {"name": "\x1b[2J" * 99})),
}  # fmt: skip


def instead(reply: Message, other: RecordDict) -> tuple[str, dict[str, bytes]]:
    """A reply to the same question with another content."""
    question = Message(RecordDict(), MALLORY, "query.describe")
    question.metadata.__dict__["_message_id"] = reply.metadata.reply_to_message_id
    return as_sent(Message(other, reply_to=question))


CASES = [(name, True) for name in RUBBISH] + [("no head", False), ("no name", False), ("a name that is none", False)]


@pytest.mark.parametrize(("rubbish", "named"), CASES)
def test_rubbish_costs_only_the_site_that_sends_it(rubbish, named, tmp_path):
    events = run(tmp_path, RUBBISH[rubbish], named)
    status = status_of(tmp_path / "server")
    assert [row["name"] for row in status["clients"] if row["state"] == "member"] == ["site-1", "site-2"]
    refined = [row["client"] for row in events if row["event"] == "answered" and row["phase"] == "refine"]
    assert sorted(refined) == ["site-1", "site-2"]
    who = {"mallory" if named else str(MALLORY)}
    assert {row["client"] for row in events if row["event"] == "failed"} == who
    assert {row["client"] for row in status["refusals"]} == who


def repeating(payloads: dict[str, bytes], times: int) -> Rubbish:
    """A reply with these payloads, each of whose arrays lists its first piece so many times."""

    def changed(reply: Message) -> tuple[str, dict[str, bytes]]:
        root, objects = instead(reply, content(payloads, {"name": "mallory"}))
        for name, data in objects.items():
            if data.startswith(b"Array "):
                head, _, body = data.partition(b"\x00")
                new = json.dumps(json.loads(body) | {"arraychunk_ids": times * [0]}).encode()
                objects[name] = b" ".join([*head.split(b" ")[:2], str(len(new)).encode()]) + b"\x00" + new
        return root, objects

    return changed


@pytest.mark.parametrize(("n_arrays", "times"), [(1, 600), (24, 25)])
def test_a_piece_that_is_listed_many_times_takes_no_memory(n_arrays, times, tmp_path):
    """Flower alone makes 600 MB of it: of one array, or of many that each stay below any bound on one."""
    payloads = {str(i): bytes([i]) * 2**20 for i in range(n_arrays)}
    tracemalloc.start()
    try:
        events = run(tmp_path, repeating(payloads, times))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    failed = [row for row in events if row["event"] == "failed"]
    assert [row["phase"] for row in failed] == ["describe", "statistics", "refine"]
    assert all(row["client"] == "mallory" and "list their pieces so often" in row["reason"] for row in failed)
    assert peak < 2.5 * largest_reply(Terms("f", method=FIXED))


def test_a_site_of_another_width_is_left_out_by_name(tmp_path):
    odd = seal_description(Description("mallory", 30, 7, NAMES), Terms("f", method=FIXED))
    events = run(tmp_path, lambda reply: instead(reply, content({"description": odd}, {"name": "mallory"})))
    (settled,) = [row for row in events if row["event"] == "settled"]
    assert (settled["clients"], settled["left_out"]) == (["site-1", "site-2"], ["mallory"])
    status = status_of(tmp_path / "server")
    assert [row["name"] for row in status["clients"] if row["state"] == "member"] == ["site-1", "site-2"]
    assert any("most clients have 8" in row["reason"] for row in status["refusals"] if row["client"] == "mallory")


def test_an_honest_array_of_zeros_lists_one_piece_often():
    question = Message(RecordDict(), MALLORY, "query.describe")
    question.metadata.__dict__["_message_id"] = "question"
    root, objects = as_sent(Message(content({"zeros": bytes(11 * 2**20)}), reply_to=question))
    grid = SimpleNamespace(pull_messages=lambda names: [inflate_object_from_contents(root, dict(objects))])
    (reply,) = pulled(grid, "question", 11 * 2**20)
    assert parts(reply)[1] == {"zeros": bytes(11 * 2**20)}
    with pytest.raises(InputError, match="pass 11534335 bytes"):
        pulled(grid, "question", 11 * 2**20 - 1)
    assert inflate_object_from_contents(root, dict(objects)).object_id == root  # Flower's own, outside


# -------------------------------------------------------------------------------------------------- foreign text

NOISE = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\n\u202e\ud800" * 50_000  # a megabyte that a terminal would obey


def assert_tame(text: str, longest: int = 2000) -> None:
    assert len(text) < longest
    assert text.isprintable(), text


@pytest.mark.parametrize("how", ["failed", "declined", "name", "client"])
def test_text_of_a_site_is_bounded_and_escaped_wherever_it_ends_up(how, tmp_path, capsys):
    """As its error, its excuse, its name, or inside a message that is refused."""

    def noisy(reply: Message) -> tuple[str, dict[str, bytes]]:
        if how == "client":
            header = {"client": NOISE[:900], "federation": NOISE[:900], "n_features": 8, "classes": [NOISE[:900]]}
            data = seal("description", header, {"n": torch.tensor(9)})
            return instead(reply, content({"description": data}, {"name": "mallory"}))
        return instead(reply, content({}, {"name": "mallory", how: NOISE.replace("\ud800", "")}))

    events = run(tmp_path, noisy)
    assert (tmp_path / "server" / "events.jsonl").stat().st_size < 20_000
    for event in events:
        assert_tame(in_words(event))
        assert_tame(json.dumps(event))
    status = status_of(tmp_path / "server")
    for row in status["refusals"]:
        assert_tame(row["client"])
        assert_tame(row["reason"])
    shown = Console(width=200, file=io.StringIO())
    shown.print(status_view(status, lines=[in_words(event) for event in events]))
    for line in shown.file.getvalue().splitlines():
        assert_tame(line)
    with closing(sqlite3.connect(tmp_path / "server" / "ledger.sqlite")) as ledger:
        for (reason,) in ledger.execute("SELECT reason FROM refusals"):
            assert_tame(reason)
    for line in capsys.readouterr().out.splitlines():
        assert_tame(line)


def test_events_and_refusals_written_before_are_shown_tame(tmp_path):
    event = {"event": "failed", "client": NOISE, "reason": NOISE, "members": [NOISE], NOISE: 1}
    assert_tame(in_words(event), 8000)
    with Coordinator(tmp_path, Terms("f", method=FIXED)) as server, server.ledger.transaction():
        server.ledger.write_refusal("a", "table", "", 0, NOISE.replace("\ud800", ""))
    assert_tame(status_of(tmp_path)["refusals"][0]["reason"])


def test_errors_of_flower_and_logs_are_shown_tame(tmp_path, capsys, monkeypatch):
    question = Message(RecordDict(), MALLORY, "query.describe")
    question.metadata.__dict__["_message_id"] = "1"
    assert_tame(reason(Message(Error(0, NOISE), reply_to=question)))
    (tmp_path / "log").write_text(NOISE.replace("\ud800", ""))
    assert_tame(last_lines(tmp_path / "log"), 2000)

    def fail(*_: object, **__: object) -> None:
        raise InputError(NOISE)

    monkeypatch.setattr("apfl.cli.app.app", fail)
    with pytest.raises(SystemExit):
        main([])
    assert_tame(capsys.readouterr().err.strip(), 20_000)


@pytest.mark.parametrize("name", ["\x1b[2Jred", "line\nbreak", "\u202ereversed", "end\u2028line", "\ud800"])
def test_class_names_that_act_on_a_terminal_are_refused(name):
    with pytest.raises(InputError, match="no control characters"):
        Terms("f", ("fine", name))


def test_class_names_of_any_script_are_not():
    assert Terms("f", ("می\u200cخواهم", "naïve", "a, b")).n_classes == 3
