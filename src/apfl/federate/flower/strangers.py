"""How much of strangers the server takes on at a time, so that members are served whoever else knocks.

A stranger is whoever has not shown that it is a site: a request that no registered key signed, or a connection, until
it is known whose requests it brings. What the server's own user does on this machine is not counted.
"""

from __future__ import annotations

import ipaddress
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["AT_ONCE", "EACH_SECOND", "FROM_ONE_ADDRESS", "HEAD", "Connections", "Requests"]

AT_ONCE = 16  # requests of all strangers
EACH_SECOND = 50.0  # the same; a site without a clock that is right is a stranger, too, and is told so
FROM_ONE_ADDRESS = 256  # connections; a site has two or three, and several may share an address
HEAD = 30.0  # seconds for a connection to bring the head of its first request


class Requests:
    """Requests of all strangers together: so many at once, and so many each second."""

    def __init__(
        self, at_once: int = AT_ONCE, each_second: float = EACH_SECOND, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.at_once, self.each_second, self.clock = at_once, each_second, clock
        self._open, self._left, self._at = 0, each_second, clock()

    @contextmanager
    def counted(self) -> Iterator[bool]:
        """Whether there is room for one more; it counts until the block ends."""
        taken = self._take()
        self._open += taken
        try:
            yield taken
        finally:
            self._open -= taken

    def _take(self) -> bool:
        now = self.clock()
        self._left = min(self.each_second, self._left + (now - self._at) * self.each_second)
        self._at = now
        if self._open >= self.at_once or self._left < 1:
            return False
        self._left -= 1
        return True


class Connections:
    """Open connections of each address; of IPv6, of each network of 64 bits, all of which one machine may use."""

    def __init__(self, most: int = FROM_ONE_ADDRESS) -> None:
        self.most = most
        self._open: Counter[str] = Counter()

    def opens(self, address: str) -> bool:
        """Count one more of this address; whether there was room for it."""
        network = _network(address)
        self._open[network] += 1
        return self._open[network] <= self.most

    def closes(self, address: str) -> None:
        """One less."""
        network = _network(address)
        self._open[network] -= 1
        if not self._open[network]:
            del self._open[network]


def _network(address: str) -> str:
    """Whose connections count together.

    >>> _network("192.0.2.7"), _network("2001:db8::1") == _network("2001:db8::2"), _network("::ffff:192.0.2.7")
    ('192.0.2.7', True, '192.0.2.7')
    """
    try:
        parsed = ipaddress.ip_address(address.split("%")[0])
    except ValueError:
        return address
    if isinstance(parsed, ipaddress.IPv4Address):
        return str(parsed)
    if parsed.ipv4_mapped is not None:
        return str(parsed.ipv4_mapped)
    return str(ipaddress.ip_network((parsed, 64), strict=False))
