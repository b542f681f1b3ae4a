"""What several tests of data begin with."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder to work in, an empty cache of apfl's, and no Hub; gives the cache."""
    constants = pytest.importorskip("huggingface_hub.constants", reason="needs apfl[hub]")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("APFL_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache"
