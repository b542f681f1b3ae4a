"""Which user opened a connection, and who may read what a federation writes."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from apfl.federate import Coordinator, Terms
from apfl.federate.flower import peers
from apfl.federate.flower.events import Events
from apfl.federate.inprocess import simulate
from apfl.files import make_private
from tests.federate.federation_toys import AUTO, make_sites
from tests.federate.strangers import as_nobody, open_to_all, readable

pytestmark = pytest.mark.skipif(not peers.knows_users(), reason="this system does not say who opened a connection")


def listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family)
    try:
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        listener.bind((address, 0))
    except OSError:
        pytest.skip("this machine has no IPv6")
    listener.listen()
    return listener


@pytest.mark.parametrize(
    ("listen", "connect"), [("127.0.0.1", "127.0.0.1"), ("::1", "::1"), ("::", "127.0.0.1"), ("::", "::1")]
)
def test_a_connection_of_our_own_is_known(listen, connect):
    with listening(listen) as listener, socket.create_connection((connect, listener.getsockname()[1])) as client:
        accepted, _ = listener.accept()
        with accepted:
            assert peers.is_own(accepted)
            client.close()
            assert not peers.is_own(accepted)  # what is closed belongs to nobody


@pytest.mark.parametrize("end", ["open", "half closed", "closed", "reset"])
def test_a_connection_of_another_user_is_not_ours(end):
    """Also one that is closed at once: the kernel may show what nobody holds any more as root's."""
    with listening("127.0.0.1") as listener:
        port = listener.getsockname()[1]

        def connect() -> bool:
            client = socket.create_connection(("127.0.0.1", port))
            client.sendall(b"POST /v1/control/start-run HTTP/1.1")
            if end == "half closed":
                client.shutdown(socket.SHUT_WR)
            if end == "reset":
                client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            if end in ("closed", "reset"):
                client.close()
                return True
            accepted, _ = listener.accept()
            return as_seen_by_us(accepted)

        # The child's socket is accepted here while the child holds it; it ends when the child does.
        if end in ("closed", "reset"):
            as_nobody(connect)
            accepted, _ = listener.accept()
            with accepted:
                assert not peers.is_own(accepted)
        else:
            assert as_nobody(connect) is False


def as_seen_by_us(accepted: socket.socket) -> bool:
    """Whether a process of root would take the connection for its own: the child asks in our place."""
    there, here = peers._address(accepted.getpeername()), peers._address(accepted.getsockname())
    return peers._user(there, here) == 0


def modes(folder: Path) -> dict[str, int]:
    return {str(path.relative_to(folder)): stat.S_IMODE(path.stat().st_mode) for path in sorted(folder.rglob("*"))}


@pytest.mark.parametrize("umask", [0o022, 0])
def test_what_is_kept_is_for_its_owner_alone(umask, tmp_path):
    """Under the usual umask, and without one: ledger, blobs, what a site sent, and its model."""
    before = os.umask(umask)
    try:
        sites, server = make_sites(tmp_path), tmp_path / "server"
        simulate(sites, Terms("f", method=AUTO), server)
        with Coordinator(server):
            Events(server, "7")("started")
            found = modes(server)
            assert {"ledger.sqlite", "ledger.sqlite-wal", "lock", "events.jsonl", "blobs/sum-1.safetensors"} <= set(
                found
            )
            assert {mode for name, mode in found.items() if name != "blobs"} == {0o600}
        assert [stat.S_IMODE(path.stat().st_mode) for path in (server, server / "blobs")] == [0o700, 0o700]
        home = tmp_path / "sites" / "f" / "site-0"
        assert {"draft.json", "sent.json", "model.safetensors"} <= set(modes(home))
        assert set(modes(home).values()) == {0o600}
        assert stat.S_IMODE(home.stat().st_mode) == 0o700
    finally:
        os.umask(before)


@pytest.mark.parametrize("umask", [0o022, 0])
def test_nobody_else_adds_or_replaces_a_key(umask, tmp_path):
    """Whoever can write into the folder of keys is admitted."""
    pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")
    from apfl.federate.flower.keys import make_certificates, make_site_key, signing_key

    before = os.umask(umask)
    try:
        make_certificates(tmp_path / "server" / "keys", ["localhost"])
        make_site_key(tmp_path / "server" / "keys", "a")
        signing_key(tmp_path / "server")
    finally:
        os.umask(before)
    found = modes(tmp_path / "server")
    assert {name for name, mode in found.items() if mode == 0o600} == {
        "keys/a.key", "keys/ca.key", "keys/server.key", "signing.key"
    }  # fmt: skip
    assert {mode for name, mode in found.items() if name.endswith((".crt", ".pub"))} == {0o644}  # public
    assert found["keys"] == 0o700


def test_another_user_reads_nothing_of_it(tmp_path):
    folder = tmp_path / "server"
    simulate(make_sites(tmp_path), Terms("f", method=AUTO), folder)
    open_to_all(folder)
    (tmp_path / "sites").chmod(0o755)
    assert as_nobody(lambda: readable(folder)) == []
    assert as_nobody(lambda: [name for name in readable(tmp_path / "sites") if "site-" in name]) == []


def test_making_private_leaves_what_a_link_points_to(tmp_path):
    (tmp_path / "shared").write_text("for all")
    (tmp_path / "shared").chmod(0o644)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "own").write_text("ours")
    (tmp_path / "folder" / "link").symlink_to(tmp_path / "shared")
    (tmp_path / "folder" / "script").write_text("#!/bin/sh")
    (tmp_path / "folder" / "script").chmod(0o755)
    make_private(tmp_path / "folder")
    assert stat.S_IMODE((tmp_path / "folder" / "script").stat().st_mode) == 0o700  # it still runs
    assert stat.S_IMODE((tmp_path / "shared").stat().st_mode) == 0o644
    assert stat.S_IMODE((tmp_path / "folder" / "own").stat().st_mode) == 0o600
