"""The server's questions as messages that sites obey: signed with the federation's key."""

from __future__ import annotations

from pathlib import Path

from flwr.app import Message

from apfl.federate.coordinator import Coordinator
from apfl.federate.flower.keys import signing_key
from apfl.federate.flower.wire import content
from apfl.federate.instructions import Instruction, Signer, hashes

__all__ = ["Instructor"]


class Instructor:
    """Makes questions of a run into signed messages."""

    def __init__(self, coordinator: Coordinator, folder: Path, run: str) -> None:
        self.federation, self.run = coordinator.draft.federation, run
        self.signer = Signer(*signing_key(folder), coordinator.ledger)

    def message(self, payloads: dict[str, bytes], node: int, client: str | None, kind: str, group: str = "") -> Message:
        """A message that the site at this node obeys, once."""
        question = Instruction(self.federation, self.run, str(node), client or "", kind, hashes(payloads))
        return Message(content(payloads, self.signer.sign(question)), node, kind, group_id=group)
