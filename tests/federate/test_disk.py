"""The coordinator, a site and their commands on disks that are full or read-only: a sentence, then they go on."""

from __future__ import annotations

import resource
import signal
import sys
from collections import deque

import pytest

from apfl.errors import InputError
from apfl.federate import Coordinator, Terms
from apfl.federate.blobs import FolderError
from apfl.federate.flower.bundle import pyproject, remove_broken_app
from apfl.federate.flower.events import Events
from apfl.federate.flower.superlink import Patient
from apfl.files import check_room, replacing
from tests.commands import here as apfl
from tests.federate.disks import filled, read_only, small_disk
from tests.federate.federation_toys import FIXED, contribute, make_sites, same, seen

FULL = "free some space on this disk, then start again"
READ_ONLY = "mount this disk for writing, then start again"


@pytest.mark.parametrize("keep", [True, False])
def test_a_coordinator_whose_disk_fills_up_goes_on_exactly(keep, tmp_path):
    sites, terms = make_sites(tmp_path), Terms("f", method=FIXED, keep_contributions=keep)
    with Coordinator(tmp_path / "roomy", terms) as server:
        contribute(server, sites)
        expected = seen(server.publish(), server.terms)
    with small_disk(tmp_path / "small", 4), Coordinator(tmp_path / "small", terms) as server:
        for site in sites:
            server.describe(site.describe(server.invitation()), site.name)
        agreement = server.settle()
        assert server.accept(sites[0].statistics(agreement), "site-0").ok
        with filled(tmp_path / "small"):
            for site in sites[1:]:
                with pytest.raises(FolderError, match=FULL):
                    server.accept(site.statistics(agreement), site.name)
        for site in sites:
            outcome = server.accept(site.statistics(agreement), site.name).outcome
            assert outcome == ("duplicate" if site.name == "site-0" else "accepted")
        with filled(tmp_path / "small"), pytest.raises(FolderError, match=FULL):
            server.publish()
        assert same(seen(server.publish(), server.terms), expected)


def test_the_ledger_itself_on_a_full_disk_says_so(tmp_path):
    """A transaction alone, without a file beside it: SQLite's own words advised to restore a backup."""
    with small_disk(tmp_path / "small", 2), Coordinator(tmp_path / "small", Terms("f", method=FIXED)) as server:

        def keep(number: int) -> None:
            with server.ledger.transaction():
                server.ledger.put(f"key-{number}", "x" * 10_000)

        with filled(tmp_path / "small"), pytest.raises(FolderError, match=FULL):
            deque(map(keep, range(1000)))
        with server.ledger.transaction():
            server.ledger.put("after", "x")
        assert server.ledger.get("after") == "x"


def test_a_read_only_folder_is_a_sentence(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "flwr", sys)  # as if installed
    folder, (site, *_) = tmp_path / "server", make_sites(tmp_path)
    with Coordinator(folder, Terms("f", method=FIXED)) as server:
        invitation = server.invitation()
    (tmp_path / "sites").mkdir()
    with read_only(folder), read_only(tmp_path / "sites"):
        with pytest.raises(InputError, match=READ_ONLY):
            Coordinator(folder)
        assert apfl("federate", "server", folder) == 2
        assert READ_ONLY in capsys.readouterr().err
        assert apfl("federate", "status", folder) == 2
        assert READ_ONLY in capsys.readouterr().err
        with pytest.raises(InputError, match=READ_ONLY):
            site.describe(invitation)
    assert site.describe(invitation)


def test_room_is_asked_for_before_an_upload(tmp_path):
    with small_disk(tmp_path / "small", 3):
        check_room(tmp_path / "small")
        with pytest.raises(InputError, match=r"3\.0 MiB are free and 5\.0 MiB are needed; free some space"):
            check_room(tmp_path / "small", 4 << 20)


def test_an_event_that_does_not_fit_leaves_no_half_line(tmp_path):
    """A limit on the file's size makes the system take a part of the line, as a full disk does."""
    events = Events(tmp_path, "7")
    events("started", deadline=1.0)
    size = events.path.stat().st_size
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, before[1]))
    try:
        with pytest.raises(InputError, match=FULL):
            events("asked", client="a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert events.path.stat().st_size == size
    with events.path.open("ab") as file:
        file.write(b'{"event": "as\n')  # what an earlier version left
    events("finished", published=True)
    assert [event["event"] for _, event in Events.read(events.path)] == ["started", "finished"]


def test_an_app_that_was_not_copied_completely_is_installed_again(tmp_path):
    import apfl as package

    whole, half, other = (
        tmp_path / "apps" / name
        for name in (f"apfl.apfl.{package.__version__}.1", f"apfl.apfl.{package.__version__}.2", "x.y.0.1.0")
    )
    for folder, text in ((whole, pyproject()), (half, pyproject()[:200]), (other, "")):
        with replacing(folder / "pyproject.toml") as temporary:
            temporary.write_text(text)
    remove_broken_app(tmp_path)
    assert [folder.exists() for folder in (whole, half, other)] == [True, False, True]
    remove_broken_app(tmp_path / "nothing")


@pytest.mark.parametrize(("path", "expected"), [("/v1/fleet/send-node-heartbeat", 503), ("/v1/runtime/x", 500)])
def test_a_site_is_told_to_try_again(path, expected):
    """Flower's clients repeat a request at 503; the run itself must end, not wait."""
    import asyncio

    got = []

    async def fails(scope, receive, send):
        await send({"type": "http.response.start", "status": 500, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def send(message):
        got.append(message.get("status"))

    asyncio.run(Patient(fails)({"type": "http", "path": path}, None, send))
    assert got == [expected, None]
