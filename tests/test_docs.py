"""What the documentation shows, runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from apfl import random_map

ROOT = Path(__file__).parents[1]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_readme_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    X, y = X[:200], y[:200]
    site = np.array(["hospital-a", "hospital-b"])[np.arange(200) % 2]
    z, y_onehot = torch.from_numpy(X), torch.eye(10, dtype=torch.float64)[y]
    names = {
        "X": X, "y": y, "site": site, "X_new": X, "site_new": site, "n_in": 64, "z": z, "y_onehot": y_onehot,
        "psi": random_map(64, 32, seed=1),
    }  # fmt: skip
    estimator, pieces = python_blocks("README.md")
    exec(estimator, names)
    assert names["clf"].clients_ == ["hospital-a"]
    assert (tmp_path / "a.safetensors").exists()
    # Each site runs the line with its own rows.
    exec(pieces.replace("upload = ", "upload_a = upload_b = "), names)
    assert names["refinement"].shape == (32, 10)


def test_running_page_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    np.savez("features.npz", features=X[:900], labels=y[:900])
    (block,) = python_blocks("docs/running.md")
    names: dict[str, object] = {}
    exec(block.replace("n_clients=20, alpha=0.1", "n_clients=4, alpha=1.0"), names)
    assert names["record"].accuracy_client_mean > 0.8


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
