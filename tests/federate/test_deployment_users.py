"""Another user of the server's machine, and of a site's: it starts no run, takes no task and reads no file."""

from __future__ import annotations

import hashlib
import ssl
from pathlib import Path

import pytest

from tests.federate.strangers import as_nobody, open_to_all, readable
from tests.federate.test_deployment import FIXED, assert_central
from tests.federate.world import World, free_port, world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = [pytest.mark.deployment, pytest.mark.filterwarnings("ignore:GitWildMatchPattern")]  # Flower's

PYPROJECT = """
[project]
name = "thief"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []
[tool.flwr.app]
publisher = "nobody"
[tool.flwr.app.components]
serverapp = "thief:app"
clientapp = "thief:app"
"""
THIEF = """
from pathlib import Path
Path("{mark}").write_text(Path("{key}").read_text())
"""


def start_run(mark: Path, key: Path) -> bytes:
    """Flower's message that starts a run of code of the sender's own."""
    from flwr.cli.build import build_fab_from_files
    from flwr.proto.control_pb2 import StartRunRequest
    from flwr.proto.fab_pb2 import Fab

    files = {"pyproject.toml": PYPROJECT.encode(), "thief.py": THIEF.format(mark=mark, key=key).encode()}
    content, _ = build_fab_from_files(files)
    return StartRunRequest(fab=Fab(content=content, hash_str=hashlib.sha256(content).hexdigest())).SerializeToString()


def post(url: str, body: bytes, verify: ssl.SSLContext | bool = False) -> int:
    import httpx
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

    headers = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}
    return httpx.post(url, content=body, headers=headers, verify=verify, timeout=30).status_code


def runtime_port(w: World, site: str) -> str:
    """The loopback port of a site's own processes."""
    (pid,) = w.pids(site, "apfl.federate.flower.supernode")
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    return words[words.index("--port") + 1]


def test_another_user_starts_no_run_and_reads_no_file(tmp_path):
    with world(tmp_path, ["a"], d_primary=64, quorum=1, **FIXED) as w:
        w.server()
        w.join("a")
        w.connected("a")
        w.finish(w.run())
        verify = ssl.create_default_context(cafile=w.folder / "keys/ca.crt")
        mark = tmp_path / "stolen"
        body, server = start_run(mark, w.folder / "keys" / "ca.key"), f"https://127.0.0.1:{w.port}/v1"
        site = f"http://127.0.0.1:{runtime_port(w, 'a')}/v1/runtime"
        assert as_nobody(lambda: post(f"{server}/control/start-run", body, verify)) == 403
        for url in (f"{server}/control/list-runs", f"{server}/runtime/acquire-task", f"{server}/runtime/get-nodes"):
            assert as_nobody(lambda url=url: post(url, b"", verify)) == 403
        for task in ("acquire-task", "pull-messages"):
            assert as_nobody(lambda task=task: post(f"{site}/{task}", b"")) == 403
        open_to_all(w.folder)
        open_to_all(tmp_path / "a" / "site" / "any")
        assert as_nobody(lambda: readable(w.folder)) == []
        assert not [
            name for name in as_nobody(lambda: readable(tmp_path / "a" / "site")) if "sent" in name or "model" in name
        ]
        assert not any(mode & 0o077 for mode in modes(w.folder))
        assert not any(mode & 0o077 for mode in modes(tmp_path / "a" / "site"))
        assert not mark.exists()
        assert logged_secrets(tmp_path) == []
        # The very same message of the server's own user works: it is the user that was refused.
        assert post(f"{server}/control/start-run", body, verify) == 200
        assert post(f"{site}/acquire-task", b"") != 403
        w.until(mark.exists, "the code of the server's own user")


def test_another_user_takes_no_part_without_keys(tmp_path):
    """On loopback there are no keys, and every user of the machine is on loopback."""
    from flwr.proto.fleet_pb2 import RegisterNodeFleetRequest

    with world(tmp_path, ["a"], secure=False, d_primary=64, quorum=1, **FIXED) as w:
        w.server()
        url, body = f"http://127.0.0.1:{w.port}/v1/fleet", RegisterNodeFleetRequest(public_key=b"x").SerializeToString()
        assert as_nobody(lambda: post(f"{url}/register-node", body)) == 403
        assert as_nobody(lambda: post(f"{url}/activate-node", b"")) == 403
        w.join("a")
        w.connected("a")
        w.finish(w.run())
        assert_central(w, ["a"])


def logged_secrets(root: Path) -> list[str]:
    """Lines of private keys that occur in a log, in the events, or in what a command printed."""
    logs = [path for pattern in ("*.log", "events.jsonl") for path in root.rglob(pattern)]
    keys = [path for path in root.rglob("*.key") if "PRIVATE KEY" in path.read_text()]
    secrets = {line for key in keys for line in key.read_text().splitlines() if len(line) > 40 and "KEY" not in line}
    assert len(logs) >= 5
    assert len(secrets) >= 9
    return [path.name for path in logs for secret in secrets if secret in path.read_text(errors="replace")]


def modes(folder: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in folder.rglob("*")]


def test_the_keys_in_the_folder_are_the_door_and_there_is_one_server(tmp_path):
    """A replaced key did not count: the old one was still admitted, the new one was not."""
    with world(tmp_path, ["a"], d_primary=64, quorum=1, **FIXED) as w:
        w.server()
        words = ["federate", "server", w.folder, "--port", free_port(), "--secure"]
        second = w.start("second", words)
        w.join("a", "--patience", "1")
        w.connected("a")
        w.until(lambda: second.poll() is not None, "the second server to be refused")
        assert second.returncode == 2
        assert f"{w.folder} is in use by another process of apfl" in " ".join(w.log("second").split())
        public = w.folder / "keys" / "a.pub"
        old, former = public.read_bytes(), w.json("federate", "status", w.folder)["admitted"]
        assert list(former) == ["a"]
        w.apfl("federate", "keys", tmp_path / "new", "--site", "a")
        public.write_bytes((tmp_path / "new" / "a.pub").read_bytes())
        w.until(lambda: "changed the key of a" in w.log("server"), "the lock to be changed")
        w.until(lambda: "does not admit the key of a" in w.log("a"), "the old key to be turned away")
        (w.folder / "keys" / "a.key").write_bytes((tmp_path / "new" / "a.key").read_bytes())
        w.join("a", "--patience", "1", role="new")
        w.connected("new")
        w.finish(w.run())  # and `run` talks to the first server
        assert_central(w, ["a"])
        admitted = w.json("federate", "status", w.folder)["admitted"]
        assert admitted["a"].startswith("SHA256:")
        assert admitted != former
        public.unlink()
        w.until(lambda: "does not admit the key of a" in w.log("new"), "the door to be shut")
        assert "no longer admitted: a" in w.log("server")
        assert w.json("federate", "status", w.folder)["admitted"] == {}
        public.write_bytes(old)
        w.until(lambda: w.json("federate", "status", w.folder)["admitted"] == former, "the first key again")
