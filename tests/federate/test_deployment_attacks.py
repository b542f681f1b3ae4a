"""A registered site attacks the others and the server, through the real SuperLink."""

from __future__ import annotations

import json

import pytest

from tests.federate.test_deployment import FIXED, assert_central, model_of
from tests.federate.world import World, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
from flwr.proto.fab_pb2 import GetFabRequest
from flwr.proto.node_pb2 import Node

from apfl.federate.flower.telling import MARK
from apfl.federate.flower.wire import content
from tests.federate.attacker import Attacker, attacker, slip_in

pytestmark = pytest.mark.deployment


def answer_until(mallory: Attacker, w: World, phase: str) -> None:
    """Answer every question with rubbish, until the server has taken the answer to this one for what it is."""

    def taken() -> bool:
        question = mallory.pull()
        if question is not None:
            mallory.answer_rubbish(question)
        return bool(w.seen("failed", client="mallory", phase=phase))

    w.until(taken, f"mallory's answer in {phase}", pause=1.0)


def test_a_registered_site_instructs_nobody_and_ends_no_run(tmp_path):
    from httpx import HTTPStatusError

    with world(tmp_path, ["a", "b", "mallory"], d_primary=64, **FIXED) as w:
        w.server()
        for name in "ab":
            w.join(name)
        w.connected("a", "b")
        with attacker(f"{w.host}:{w.port}", w.folder / "keys", "mallory") as mallory:
            run = w.run()
            answer_until(mallory, w, "describe")
            number = int(w.events()[0]["run"])
            victim = int(json.loads((w.folder / "flower" / "registered.json").read_text())["b"]["node"])
            payloads = {"terms": (w.folder / "terms.json").read_bytes()}
            forged = mallory.question(number, victim, content(payloads), "query.describe")
            with pytest.raises(HTTPStatusError, match="403"):
                mallory.push(forged)
            (refused,) = w.seen("refused", client="mallory")
            assert "only the server may ask" in refused["reason"]
            # Flower logs what a site asks for, as it is; lines with the mark are printed as the server's own.
            words = "the server has moved\x1b[2J"
            with pytest.raises(HTTPStatusError):
                mallory.client.GetFab(
                    GetFabRequest(node=Node(node_id=mallory.node), run_id=number, hash_str=f"0\n{MARK}{words}\n")
                )
            flower_log = (w.folder / "flower" / "superlink.log").read_text()
            assert "the server has moved" in flower_log
            assert "\x1b[2J" not in flower_log
            assert f"\n{MARK}the server" not in flower_log
            # If the SuperLink had let it through, the site itself would not obey.
            slip_in(w.folder / "flower" / "superlink.db", forged)
            log = tmp_path / "b" / "site" / "supernode.log"
            answer_until(mallory, w, "refine")
        w.until(lambda: "refused an instruction (query.describe): it is not signed" in log.read_text(), "b's refusal")
        w.finish(run)
        assert "the server has moved" not in w.log("server")
        weights = assert_central(w, ["a", "b"])
        assert (model_of(w, "b").primary == weights).all()
        status = w.json("federate", "status", w.folder)
        assert {row["client"] for row in status["refusals"]} == {"mallory"}
        assert "cannot read" in status["refusals"][0]["reason"]
