"""Who is at the other end of a connection within this machine.

Flower asks for no credentials on the interfaces by which runs are started and its own processes talk, and whoever may
use them runs code as the user of the server. The kernel knows which user opened a connection within the machine. So
only connections of this very user, or of root, reach those interfaces; there is no secret that could leak.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from apfl.federate.flower.strangers import HEAD, Connections

__all__ = ["OWN", "is_own", "knows_users", "protocol"]

Address = tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int]
OWN = "apfl.own"  # in the state of a request: whether it comes from the user of this process
TABLES = tuple(Path("/proc/self/net") / name for name in ("tcp", "tcp6"))
ESTABLISHED = "01"


def protocol() -> Any:
    """uvicorn's HTTP protocol, which notes with each request whether its connection is of our own user.

    Others have so many connections from one address, and none of them for long without a request (`strangers`).
    """
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    base: Any = AutoHTTPProtocol
    connections = Connections()

    class Vouched(base):  # type: ignore[misc]
        app_state: dict[str, Any]
        cycle: Any  # uvicorn's: the request that came last
        counted = ""  # the address of a connection that is not our own user's

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            own = is_own(transport.get_extra_info("socket"))
            self.app_state = {**self.app_state, OWN: own}
            if not own:
                self.counted = str((transport.get_extra_info("peername") or ("unknown",))[0])
                if not connections.opens(self.counted):
                    transport.abort()
                self.loop.call_later(HEAD, self.close_if_silent, transport)

        def close_if_silent(self, transport: Any) -> None:
            """End a connection that has brought no request."""
            if self.cycle is None and not transport.is_closing():
                transport.abort()

        def connection_lost(self, exc: Exception | None) -> None:
            if self.counted:
                connections.closes(self.counted)
                self.counted = ""
            super().connection_lost(exc)

    return Vouched


def is_own(connection: socket.socket) -> bool:
    """Whether our own user, or root, opened the other end of a connection."""
    try:
        there, here = _address(connection.getpeername()), _address(connection.getsockname())
        if not (there[0].is_loopback or there[0] == here[0]):
            return False
        if not knows_users():
            return True
        user = _user(there, here)
        connection.getpeername()  # fails if it has ended: then the user may be that of the next one from this port
    except (OSError, ValueError):
        return False
    return user in (os.geteuid(), 0)


def knows_users() -> bool:
    """Whether this system says who opened a connection; else every user of this machine counts as our own."""
    return TABLES[0].exists()


def _user(remote: Address, local: Address) -> int | None:
    """The user who opened the connection from ``there`` to ``here``; None if there is no such connection."""
    for row in _rows():
        # A socket that its process has closed has no inode, and may be shown as root's.
        if row[3] == ESTABLISHED and row[9] != "0" and (_entry(row[1]), _entry(row[2])) == (remote, local):
            return int(row[7])
    return None


def _rows() -> Iterator[list[str]]:
    for table in TABLES:
        if table.exists():  # a machine may be without IPv6
            yield from (line.split() for line in table.read_text().splitlines()[1:])


def _entry(text: str) -> Address:
    """An address as the kernel prints it: words of 32 bits in the order of this machine's bytes.

    >>> _entry("0100007F:1F90" if os.sys.byteorder == "little" else "7F000001:1F90")
    (IPv4Address('127.0.0.1'), 8080)
    """
    words, port = text.split(":")
    packed = b"".join(
        socket.htonl(int(words[start : start + 8], 16)).to_bytes(4, "big") for start in range(0, len(words), 8)
    )
    return _address((str(ipaddress.ip_address(packed)), int(port, 16)))


def _address(pair: tuple[Any, ...]) -> Address:
    address = ipaddress.ip_address(pair[0])
    mapped = getattr(address, "ipv4_mapped", None)  # a socket for IPv6 shows a peer of IPv4 so
    return mapped or address, int(pair[1])
