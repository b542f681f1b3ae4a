"""The Flower app: a pyproject that names the two components of this package, and no code.

Every party runs the apfl it installed itself. The bundle that Flower sends around holds nothing to execute, and
its hash is the same wherever this version is installed, which is what `supernode` checks.
"""

from __future__ import annotations

import hashlib
import shutil
import tomllib
from pathlib import Path

import apfl
from apfl.files import replacing

__all__ = ["DEADLINE", "app_hash", "remove_broken_app", "write_app"]

DEADLINE = 600.0  # seconds that a run waits for sites in each stage

PYPROJECT = """\
[project]
name = "apfl"
version = "{version}"
description = "Analytic personalised federated learning"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "apfl"

[tool.flwr.app.components]
serverapp = "apfl.federate.flower.server_app:app"
clientapp = "apfl.federate.flower.client_app:app"

# Overridden with `flwr run APP --run-config 'folder="/srv/federation" deadline=60.0'`.
[tool.flwr.app.config]
folder = ""
deadline = {deadline}
linger = 0.0
evaluate = false
leave = ""
forget = false
"""


def pyproject() -> str:
    """What the app's one file says."""
    return PYPROJECT.format(version=apfl.__version__, deadline=DEADLINE)


def write_app(folder: Path) -> Path:
    """The app as a folder that ``flwr run`` takes."""
    with replacing(folder / "pyproject.toml") as temporary:
        temporary.write_text(pyproject())
    return folder


def remove_broken_app(flwr_home: Path) -> None:
    """Delete a copy of the app that a full disk left incomplete: Flower would not install it again."""
    for copy in (flwr_home / "apps").glob(f"apfl.apfl.{apfl.__version__}.*"):
        if not _is_whole(copy / "pyproject.toml"):
            shutil.rmtree(copy, ignore_errors=True)


def _is_whole(file: Path) -> bool:
    try:
        found, own = (tomllib.loads(text)["tool"]["flwr"]["app"] for text in (file.read_text(), pyproject()))
        return all(found[part] == own[part] for part in ("components", "config"))
    except (OSError, ValueError, KeyError):
        return False


def app_hash() -> str:
    """The hash of the bundle Flower makes of the app."""
    from flwr.cli.build import build_fab_from_files

    content, _ = build_fab_from_files({"pyproject.toml": pyproject().encode()})
    return hashlib.sha256(content).hexdigest()
