"""The Hugging Face Hub as far as models are pushed and pulled, behind HTTP: no request leaves the process."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

huggingface_hub = pytest.importorskip("huggingface_hub", reason="needs the extra hub: pip install 'apfl[hub]'")
httpx = pytest.importorskip("httpx", reason="needs the extra hub: pip install 'apfl[hub]'")

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class Repository:
    private: bool
    files: dict[str, bytes] = field(default_factory=dict)


@dataclass
class FakeHub:
    """Repositories by name; a request that it does not know is an error that says so."""

    repositories: dict[str, Repository] = field(default_factory=dict)

    def client(self) -> httpx.Client:
        return httpx.Client(transport=httpx.MockTransport(self.answer), follow_redirects=True)

    def answer(self, request: httpx.Request) -> httpx.Response:
        routes: dict[str, Callable[..., httpx.Response]] = {
            r"POST /api/repos/create": self._create,
            r"POST /api/validate-yaml": lambda request: httpx.Response(200, json={"errors": [], "warnings": []}),
            r"POST /api/models/(\w+/\w+)/preupload/main": self._before_upload,
            r"POST /api/models/(\w+/\w+)/commit/main": self._commit,
            r"GET /api/models/(\w+/\w+)(?:/revision/\w+)?": self._info,
            r"GET /api/models/(\w+/\w+)/tree/\w+": self._tree,
            r"(?:GET|HEAD) /(\w+/\w+)/resolve/\w+/(.+)": self._file,
        }
        for pattern, route in routes.items():
            if match := re.fullmatch(pattern, f"{request.method} {request.url.path}"):
                return route(request, *match.groups())
        raise AssertionError(f"the fake Hub does not know {request.method} {request.url}")

    def _create(self, request: httpx.Request) -> httpx.Response:
        asked = json.loads(request.content)
        name = "/".join(filter(None, (asked.get("organization"), asked["name"])))
        known = self.repositories.get(name)
        self.repositories.setdefault(name, Repository(asked.get("visibility") == "private"))
        return httpx.Response(409 if known else 200, json={"url": f"https://huggingface.co/{name}", "error": "there"})

    def _before_upload(self, request: httpx.Request, name: str) -> httpx.Response:
        paths = [each["path"] for each in json.loads(request.content)["files"]]
        how = {"uploadMode": "regular", "shouldIgnore": False}
        return httpx.Response(200, json={"files": [{"path": path, **how} for path in paths]})

    def _commit(self, request: httpx.Request, name: str) -> httpx.Response:
        for line in request.content.splitlines():
            entry = json.loads(line)
            if entry["key"] == "file":
                self.repositories[name].files[entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
        url = f"https://huggingface.co/{name}/commit/{COMMIT}"
        return httpx.Response(200, json={"success": True, "commitOid": COMMIT, "commitUrl": url, "hookOutput": ""})

    def _info(self, request: httpx.Request, name: str) -> httpx.Response:
        if name not in self.repositories:
            return httpx.Response(404, headers={"X-Error-Code": "RepoNotFound"}, json={"error": "no such repository"})
        found = self.repositories[name]
        siblings = [{"rfilename": path} for path in found.files]
        return httpx.Response(200, json={"id": name, "private": found.private, "sha": COMMIT, "siblings": siblings})

    def _tree(self, request: httpx.Request, name: str) -> httpx.Response:
        files = self.repositories[name].files.items()
        return httpx.Response(
            200, json=[{"type": "file", "path": path, "size": len(content), "oid": COMMIT} for path, content in files]
        )

    def _file(self, request: httpx.Request, name: str, path: str) -> httpx.Response:
        content = self.repositories[name].files.get(path)
        if content is None:
            return httpx.Response(404, headers={"X-Error-Code": "EntryNotFound", "X-Repo-Commit": COMMIT})
        headers = {"ETag": f'"{hashlib.sha256(content).hexdigest()}"', "X-Repo-Commit": COMMIT}
        if request.method == "HEAD":
            return httpx.Response(200, headers={**headers, "Content-Length": str(len(content))})
        return httpx.Response(200, headers=headers, content=content)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """In place of the Hub, with a token and an empty cache."""
    from huggingface_hub.utils._http import default_client_factory

    fake = FakeHub()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", "hf_test")
    huggingface_hub.set_client_factory(fake.client)
    yield fake
    huggingface_hub.set_client_factory(default_client_factory)
