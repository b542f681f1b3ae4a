"""A site whose clock is wrong learns it from the server's answers."""

from __future__ import annotations

import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from apfl.federate.flower import clock, keys
from apfl.federate.flower.clock import seconds_ahead, wrong_clock


@contextmanager
def server(behind: float, tls: keys.ServerKeys | None = None) -> Iterator[str]:
    """A server whose clock is behind ours; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(401)  # whatever it answers
            self.end_headers()

        def date_time_string(self, timestamp: float | None = None) -> str:
            return super().date_time_string(time.time() - behind)

        def log_message(self, *_: object) -> None:
            pass

    listening = HTTPServer(("127.0.0.1", 0), Handler)
    if tls is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.private)
        listening.socket = context.wrap_socket(listening.socket, server_side=True)
    threading.Thread(target=listening.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"127.0.0.1:{listening.server_port}"
    finally:
        listening.shutdown()
        listening.server_close()


@pytest.mark.parametrize(
    ("behind", "told"),
    [(8, "8 s ahead of the server's"), (-360, "6 min behind the server's"), (40 * 86400, "40 days ahead")],
)
def test_it_says_by_how_much_and_what_to_do(behind, told):
    with server(behind) as address:
        assert abs(seconds_ahead(address, None) - behind) < 1
        said = wrong_clock(address, None)
    # The seconds are whole ones, so 8 may be 7 or 9.
    assert any(each in said for each in (told, told.replace("8 s", "7 s"), told.replace("8 s", "9 s")))
    assert "more than 5 s ahead or 5 min behind" in said
    assert "timedatectl" in said


@pytest.mark.parametrize("behind", [0, 2, -2, -280])
def test_clocks_that_flower_accepts_are_not_mentioned(behind):
    with server(behind) as address:
        assert wrong_clock(address, None) is None


def test_the_bounds_are_those_of_flower():
    constant = pytest.importorskip("flwr.common.constant", reason="needs the flower extra: pip install 'apfl[flower]'")
    assert clock.AHEAD == constant.SYSTEM_TIME_TOLERANCE
    assert clock.BEHIND == constant.SYSTEM_TIME_TOLERANCE + constant.TIMESTAMP_TOLERANCE


def test_a_server_that_does_not_answer_has_no_clock():
    with server(0) as address:
        pass
    assert wrong_clock(address, None) is None


class LongAgo(datetime):
    @classmethod
    def now(cls, tz=None):
        return datetime.now(UTC) - timedelta(days=5000)


def test_the_clock_is_asked_for_even_if_the_certificate_seems_to_have_expired(tmp_path, monkeypatch):
    """As it does by a clock that is years ahead: then the certificate is not what is wrong."""
    pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")
    monkeypatch.setattr(keys, "datetime", LongAgo)
    expired = keys.make_certificates(tmp_path / "keys", ["127.0.0.1"], days=1)
    other = keys.make_certificates(tmp_path / "other", ["127.0.0.1"], days=1)
    with server(5000 * 86400, expired) as address:
        assert "5000 days ahead" in wrong_clock(address, expired.authority)
        assert wrong_clock(address, Path(other.authority)) is None  # another authority issued it: it says nothing
