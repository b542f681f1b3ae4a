"""A run with numbers or labels as targets in one process, with Flower's own messages and the site's own handlers."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from apfl.federate import Coordinator, Terms, status_of
from apfl.methods.apfl import APFL
from apfl.models.file import load_model
from tests.federate.number_toys import SIZES, TARGETS, draw_targets, number_terms, probe

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from flwr.app import Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from apfl.federate.flower.client_app import app
from apfl.federate.flower.conversation import Conversation, Policy
from apfl.federate.flower.events import Events
from tests.federate.test_conversation import RUN, as_sent, identity  # noqa: F401  # a fixture

DOUBLE = np.float32  # features files hold single precision


class Grid:
    """Sites by their node's number; some answer nothing to a table."""

    def __init__(self, folder: Path, nodes: Iterable[int], target: str, silent: Iterable[int] = ()) -> None:
        self.folder, self.nodes, self.target, self.silent = folder, list(nodes), target, set(silent)
        self.replies: dict[str, tuple[str, dict[str, bytes]]] = {}
        self.asked: list[tuple[int, str]] = []
        for node in self.nodes:
            rows, home = shard_of(node, target), folder / str(node)
            home.mkdir(exist_ok=True)
            values = rows.responses(0).numpy()
            np.savez(home / "rows.npz", features=rows.features, labels=values, class_names=np.array(TARGETS))

    def get_nodes(self) -> list[SimpleNamespace]:
        return [SimpleNamespace(node_id=node, name=f"site-{node}") for node in self.nodes]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        (message,) = messages
        node, name = message.metadata.dst_node_id, str(len(self.replies))
        self.asked.append((node, message.metadata.message_type))
        message.metadata.__dict__["_message_id"] = name
        home = self.folder / str(node)
        config = {"name": f"site-{node}", "folder": str(home), "data": str(home / "rows.npz"), "report": True}
        config |= {"target": self.target, "test-fraction": 0.0}
        if node in self.silent and message.metadata.message_type == "train.table":
            config["roster"] = "none"  # then it refuses these terms
        self.replies[name] = as_sent(app(message, Context(RUN, node, config, RecordDict(), {})))
        return [name]

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        replies = [inflate_object_from_contents(*self.replies[name]) for name in names]
        for reply in replies:
            reply.metadata.__dict__["_message_id"] = "as Flower's grid does"
        return replies


def shard_of(node: int, target: str):
    rows = draw_targets(SIZES[node], node, target)
    features = rows.features.float()
    return type(rows)(features, rows.labels, targets=rows.targets, target=target)


def converse(folder: Path, terms: Terms, grid: Grid) -> list[dict]:
    """A run to its end; its events."""
    (folder / "server" / "keys").mkdir(parents=True, exist_ok=True)
    for node in grid.nodes:
        (folder / "server" / "keys" / f"site-{node}.pub").touch()
    with Coordinator(folder / "server", terms) as coordinator:
        events = Events(folder / "server", str(RUN))
        before = len(events.path.read_text().splitlines()) if events.path.exists() else 0
        assert Conversation(grid, coordinator, Policy(deadline=600.0), events, folder / "server").run()
    return [json.loads(line) for line in events.path.read_text().splitlines()[before:]]


@pytest.mark.parametrize("target", ["regression", "multilabel"])
def test_a_run_ends_with_the_models_of_the_simulator(target, tmp_path):
    nodes = range(4)
    told = converse(tmp_path, number_terms(target), Grid(tmp_path, nodes, target))
    assert not [event for event in told if event["event"] == "failed"], told
    stages = ["likelihoods", "errors"] + ["thresholds"] * (target == "multilabel")
    assert [event["stage"] for event in told if event["event"] == "chosen" and "stage" in event] == stages
    (round_,) = APFL().rounds([shard_of(node, target) for node in nodes], len(TARGETS), 0)
    for node, model in zip(nodes, round_.models, strict=True):
        own = load_model(tmp_path / str(node) / "f" / f"site-{node}" / "model.safetensors")
        wanted = model.scores(probe())
        assert float((own.scores(probe()) - wanted).abs().max() / wanted.abs().max()) < 1e-9
    state = status_of(tmp_path / "server")
    assert state["phase"] == "published"
    assert state["n_refusals"] == 0
    assert state["tables"] == [f"site-{node}" for node in nodes]


def test_a_second_run_asks_nobody_for_anything(tmp_path):
    converse(tmp_path, number_terms(), Grid(tmp_path, range(4), "regression"))
    again = Grid(tmp_path, range(4), "regression")
    converse(tmp_path, number_terms(), again)
    assert {kind for _, kind in again.asked} <= {"train.rejoin"}


def test_a_member_that_sends_no_table_has_a_model_all_the_same(tmp_path):
    told = converse(tmp_path, number_terms(), Grid(tmp_path, range(4), "regression", silent=[2]))
    assert [event["client"] for event in told if event["event"] == "failed"] == ["site-2"] * 2
    assert (tmp_path / "2" / "f" / "site-2" / "model.safetensors").is_file()


def test_a_site_with_classes_is_told_what_to_give(tmp_path):
    class Classes(Grid):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            home = self.folder / "3"
            np.savez(home / "rows.npz", features=np.eye(5, dtype=DOUBLE), labels=np.arange(5) % 2)

        def push_messages(self, messages):
            (message,) = messages
            self.target = "classification" if message.metadata.dst_node_id == 3 else "regression"
            return super().push_messages([message])

    told = converse(tmp_path, number_terms(), Classes(tmp_path, range(4), "regression"))
    reasons = {event["reason"] for event in told if event["event"] == "failed"}
    assert any("terms say regression. Give join --target regression" in reason for reason in reasons), reasons
    assert status_of(tmp_path / "server")["publications"][0]["members"] == ["site-0", "site-1", "site-2"]
