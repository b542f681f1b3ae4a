"""`scripts/audit` finds advisories, and never stops a machine that cannot look them up."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib.machinery import SourceFileLoader
from importlib.util import module_from_spec, spec_from_loader
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
LEAK = {"id": "PYSEC-1", "aliases": ["CVE-2"], "summary": "it\nleaks", "withdrawn": None}


@pytest.fixture
def audit() -> ModuleType:
    loader = SourceFileLoader("audit", str(ROOT / "scripts" / "audit"))
    module = module_from_spec(spec_from_loader("audit", loader))
    loader.exec_module(module)
    return module


@pytest.fixture
def index() -> Iterator[str]:
    """An index that knows single versions of one package, and of another its latest version only."""
    pages = {
        "/good/1.0/json": [],
        "/withdrawn/1.0/json": [{**LEAK, "withdrawn": "2026-01-01"}],
        "/leaky/1.0/json": [LEAK],
        "/mirrored/json": [LEAK],
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path in pages else 404)
            self.end_headers()
            if self.path in pages:
                page = {"info": {"version": "2.0"}, "vulnerabilities": pages[self.path]}
                self.wfile.write(json.dumps(page).encode())

        def log_message(self, *_: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_an_advisory_fails_the_check(audit, index, capsys):
    assert audit.main([("good", "1.0"), ("leaky", "1.0")], index) == 1
    told = capsys.readouterr()
    assert told.err == "leaky 1.0: PYSEC-1 CVE-2: it leaks\n"
    assert told.out == "audit: 2 of 2 versions looked up, 1 advisories\n"


def test_nothing_known_passes(audit, index):
    assert audit.main([("good", "1.0"), ("withdrawn", "1.0")], index) == 0


def test_an_advisory_that_is_explained_passes(audit, index):
    audit.ACCEPTED["CVE-2"] = "apfl does not call it"
    assert audit.main([("leaky", "1.0")], index) == 0


def test_a_mirror_of_packages_tells_of_latest_versions(audit, index, capsys):
    assert audit.main([("mirrored", "2.0")], index) == 1
    assert audit.main([("mirrored", "1.0"), ("good", "1.0"), ("unknown", "1.0")], index) == 0
    assert "1 of 3 versions looked up, 0 advisories; skipped 2" in capsys.readouterr().out


def test_without_a_network_one_line_says_that_it_was_skipped(audit, capsys):
    audit.TIMEOUT = 2.0
    assert audit.main([("good", "1.0"), ("leaky", "1.0")], "http://127.0.0.1:9") == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert line.startswith("audit skipped: http://127.0.0.1:9/good/1.0/json cannot be reached: ")


def test_all_pins_are_read(audit):
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert [f"{name}=={version}" for name, version in audit.pins("\n".join(lines))] == lines


def test_the_check_looks_them_up():
    assert "scripts/audit" in (ROOT / "scripts" / "check").read_text()
