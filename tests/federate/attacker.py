"""A registered site that talks to the SuperLink by itself, and says what no SuperNode would."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")

from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_from_proto, message_to_proto
from flwr.proto.fleet_pb2 import ActivateNodeRequest, PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import ObjectTree, PushObjectRequest
from flwr.proto.node_pb2 import Node
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_id, get_object_tree
from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.config_loader import get_federation_manager, get_objectstore_linkstate_factories
from flwr.supernode.fleet_http_client import FleetHttpClient
from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

SUPERLINK = 1  # Flower's number of the server itself


class Attacker:
    """The holder of a registered key."""

    def __init__(self, client: FleetHttpClient, node: int) -> None:
        self.client, self.node = client, node

    def push(self, message: Message) -> None:
        """Send a message as it is."""
        message.metadata.__dict__["_message_id"] = message.object_id
        objects = {name: each.deflate() for name, each in get_all_nested_objects(message).items()}
        self._push(message_to_proto(remove_content_from_message(message)), get_object_tree(message), objects)

    def answer_rubbish(self, question: Message) -> None:
        """A reply whose record is none: heads and hashes are right, so that the SuperLink takes it."""
        self.act_as(question.metadata.run_id, self.node)
        reply = Message(RecordDict(), reply_to=question)
        rubbish = b"RecordDict  64\x00" + b"\xff" * 64
        body = reply.deflate().partition(b"\x00")[2]
        root = b" ".join([b"Message", get_object_id(rubbish).encode(), str(len(body)).encode()]) + b"\x00" + body
        told = message_to_proto(remove_content_from_message(reply))
        told.metadata.message_id = get_object_id(root)
        tree = ObjectTree(object_id=get_object_id(root), children=[ObjectTree(object_id=get_object_id(rubbish))])
        self._push(told, tree, {get_object_id(data): data for data in (root, rubbish)})

    def _push(self, told: Any, tree: ObjectTree, objects: dict[str, bytes]) -> None:
        node, run = Node(node_id=self.node), told.metadata.run_id
        reply = self.client.PushMessages(
            PushMessagesRequest(node=node, messages_list=[told], message_object_trees=[tree])
        )
        for name in reply.objects_to_push:
            self.client.PushObject(
                PushObjectRequest(
                    node=node, run_id=run, session_id=reply.session_id, object_id=name, object_content=objects[name]
                )
            )

    def question(self, run: int, victim: int, content: RecordDict, kind: str) -> Message:
        """A message as the server would send it."""
        self.act_as(run, SUPERLINK)
        return Message(content, victim, kind)

    def pull(self) -> Message | None:
        """A question of the server to this site, without its content; with a sign of life, or it counts as gone."""
        self.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=Node(node_id=self.node), heartbeat_interval=60.0))
        asked = self.client.PullMessages(PullMessagesRequest(node=Node(node_id=self.node))).messages_list
        return message_from_proto(asked[0]) if asked else None

    @staticmethod
    def act_as(run: int, node: int) -> None:
        """Who Flower takes this process for when it makes a message."""
        TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = run, node, 1


@contextmanager
def attacker(address: str, keys: Path, name: str) -> Iterator[Attacker]:
    """Connect to the SuperLink with the key of a site."""
    private = load_ssh_private_key((keys / f"{name}.key").read_bytes(), None)
    identity = (
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, private.public_key()),
    )
    with FleetHttpClient.from_server_address(
        address, False, (keys / "ca.crt").read_bytes(), interceptors=list(identity)
    ) as client:
        public = public_key_to_bytes(private.public_key())
        node = client.ActivateNode(ActivateNodeRequest(public_key=public, heartbeat_interval=60.0)).node_id
        yield Attacker(client, node)


def slip_in(database: Path, message: Message) -> None:
    """Put a message into the SuperLink's own database, as if it had let it through."""
    message.metadata.__dict__["_message_id"] = message.object_id
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of Flower's own migrations
        manager = get_federation_manager(is_simulation=False)
        state = get_objectstore_linkstate_factories(str(database), manager)[1].state()
    session = state.start_session(message.metadata.run_id)
    tree, objects = get_object_tree(message), get_all_nested_objects(message)
    stored, missing = state.store_message_and_object_tree(remove_content_from_message(message), tree, session)
    assert stored
    for name in missing:
        assert state.store_object(message.metadata.run_id, session, name, objects[name].deflate())
