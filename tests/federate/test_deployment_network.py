"""The network between a site and the server is cut, and comes back: the site lives in a network namespace."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.federate.test_deployment import FIXED, answers, answers_for, asked_after_accepted, assert_central
from tests.federate.world import world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = [pytest.mark.deployment, pytest.mark.slow]

HERE, THERE = "10.213.97.1", "10.213.97.2"


def ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True)


@contextmanager
def namespace() -> Iterator[tuple[str, str]]:
    """A network namespace with one cable to this machine: its name, and the cable's end here."""
    if os.geteuid() or not shutil.which("ip"):
        pytest.skip("needs root and iproute2 to make a network namespace")
    mark = uuid.uuid4().hex[:6]
    name, near, far = f"apfl-{mark}", f"apfl{mark}n", f"apfl{mark}f"
    try:
        ip("netns", "add", name)
        ip("link", "add", near, "type", "veth", "peer", "name", far)
        ip("link", "set", far, "netns", name)
        ip("addr", "add", f"{HERE}/30", "dev", near)
        ip("link", "set", near, "up")
        ip("netns", "exec", name, "ip", "addr", "add", f"{THERE}/30", "dev", far)
        ip("netns", "exec", name, "ip", "link", "set", far, "up")
        ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
    except subprocess.CalledProcessError as error:
        ip("netns", "del", name, check=False)
        pytest.skip(f"cannot make a network namespace here: {error.stderr.decode().strip()}")
    try:
        yield name, near
    finally:
        ip("netns", "del", name, check=False)
        ip("link", "del", near, check=False)


REQUEST = """
import ssl, sys, urllib.error, urllib.request
context = ssl.create_default_context(cafile=sys.argv[1])
for path in ("/health", "/v1/control/list-runs", "/v1/runtime/acquire-task", "/docs"):
    request = urllib.request.Request(f"https://{sys.argv[2]}{path}", method="GET" if path[1] in "hd" else "POST")
    try:
        print(path, urllib.request.urlopen(request, context=context, timeout=20).status)
    except urllib.error.HTTPError as error:
        print(path, error.code)
"""


def test_a_cut_network_delays_a_site_and_loses_nothing(tmp_path):
    with namespace() as (name, cable), world(tmp_path, ["a", "b", "far"], host=HERE, d_primary=256, **FIXED) as w:
        inside = ["ip", "netns", "exec", name]
        w.server()
        for site in ("a", "b"):
            w.join(site)
        w.join("far", within=inside)
        w.connected("a", "b", "far")
        # From another machine only what sites need is open: nobody there can start a run, or act as the server.
        words = [*inside, sys.executable, "-c", REQUEST, str(w.folder / "keys/ca.crt"), f"{HERE}:{w.port}"]
        said = subprocess.run(words, capture_output=True, text=True, timeout=120)
        codes = dict(line.split() for line in said.stdout.splitlines())
        assert codes == {
            "/health": "200", "/v1/control/list-runs": "403", "/v1/runtime/acquire-task": "403", "/docs": "403"
        }, said.stderr  # fmt: skip
        w.run("--deadline", 60, "--linger", 240)
        w.until(lambda: w.seen("asked", client="far", phase="statistics"), "far to be asked")
        ip("link", "set", cable, "down")
        w.until(lambda: w.seen("published", number=1), "the deadline")
        assert_central(w, ["a", "b"], 1)
        ip("link", "set", cable, "up")
        w.until(lambda: w.seen("published", number=2), "the site behind the cable")
        w.until(lambda: set(answers_for(w, "refine", 2)) == {"a", "b", "far"}, "everyone's model")
        assert_central(w, ["a", "b", "far"], 2)
        assert answers(w, "statistics") == {"a": 1, "b": 1, "far": 1}
        assert asked_after_accepted(w, "statistics") == []
