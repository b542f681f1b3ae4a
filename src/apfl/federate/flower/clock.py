"""Whether the clocks of a site and of the server agree.

Every request of a site carries a signed time. Flower refuses one from the future or from the past, in the words in
which it refuses a wrong signature. The server's own time is in the header ``Date`` of each of its HTTP answers.
"""

from __future__ import annotations

import ssl
import time
from contextlib import closing
from email.utils import parsedate_to_datetime
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path

from apfl.federate.flower.processes import split_address

__all__ = ["in_words", "seconds_ahead", "wrong_clock"]

AHEAD, BEHIND = 5.0, 305.0  # seconds that Flower lets a site's clock be ahead of the server's, and behind it
ROUNDING = 1.5  # seconds: ``Date`` has whole ones, and the server renews it once a second
TIMEOUT = 5.0
NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME


def wrong_clock(server: str, authority: Path | None) -> str | None:
    """That this clock and the server's are too far apart, by how much, and what to do; None if they are not."""
    ahead = seconds_ahead(server, authority)
    if ahead is None or -BEHIND + ROUNDING < ahead < AHEAD - ROUNDING:
        return None
    return (
        f"the clock of this machine is {in_words(abs(ahead))} {'ahead of' if ahead > 0 else 'behind'} the server's; "
        f"the server refuses sites that are more than {AHEAD:.0f} s ahead or {BEHIND / 60:.0f} min behind. Correct the "
        "clock that is wrong, here or at the server (on Linux: timedatectl set-ntp true)"
    )


def seconds_ahead(server: str, authority: Path | None) -> float | None:
    """How far this machine's clock is ahead of that of the server at HOST:PORT; None if the server does not say."""
    try:
        began = time.time()
        with closing(_connection(server, authority)) as connection:
            connection.request("GET", "/health")
            date = connection.getresponse().getheader("Date")
        return (began + time.time()) / 2 - parsedate_to_datetime(date or "").timestamp() - 0.5
    except (OSError, HTTPException, ValueError, TypeError):
        return None


def in_words(seconds: float) -> str:
    """A duration, rounded.

    >>> in_words(8.4), in_words(361.0), in_words(8000.0), in_words(3e6)
    ('8 s', '6 min', '2 h', '35 days')
    """
    for unit, size, limit in (("s", 1, 120), ("min", 60, 120 * 60), ("h", 3600, 48 * 3600)):
        if seconds < limit:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds / 86400:.0f} days"


def _connection(server: str, authority: Path | None) -> HTTPConnection:
    host, port = split_address(server)
    if authority is None:
        return HTTPConnection(host, port, timeout=TIMEOUT)
    context = ssl.create_default_context(cafile=str(authority))
    # By a clock that is wrong the certificate may have expired. Who issued it, and for which host, is checked still.
    context.verify_flags |= NO_CHECK_TIME
    return HTTPSConnection(host, port, timeout=TIMEOUT, context=context)
