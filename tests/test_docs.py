"""What the documentation shows, runs."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits

from apfl import DualStream, load_method, solve, statistics

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "results").glob("*.md")])


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_readme_snippets_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    X, y = X[:200], y[:200]
    site = np.array(["hospital-a", "hospital-b"])[np.arange(200) % 2]
    names = {"X": X, "y": y, "site": site, "X_new": X, "site_new": site}
    estimator, pieces = python_blocks("README.md")
    exec(estimator, names)
    assert names["clf"].clients_ == ["hospital-a"]
    assert (tmp_path / "a.safetensors").exists()
    alone: dict[str, object] = {}  # the pieces need nothing but themselves
    exec(pieces, alone)
    model, data, rows = alone["model"], alone["data"], alone["a"]
    assert data.features.dtype == torch.float32  # as every loader gives it
    of_both = solve(statistics(alone["phi"](alone["z"]), alone["y"]), ridge=1.0)
    torch.testing.assert_close(alone["primary"], of_both, rtol=0, atol=1e-10)  # conditioned 2e5
    primary_alone = DualStream(alone["phi"], alone["primary"])
    hits, hits_of_primary = (
        int((each.predict(data.features[rows]) == data.labels[rows]).sum()) for each in (model, primary_alone)
    )
    assert 850 < hits_of_primary < hits <= 900


def test_running_page_snippet_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    np.savez("features.npz", features=X[:900], labels=y[:900])
    (block,) = python_blocks("docs/running.md")
    names: dict[str, object] = {}
    exec(block.replace("n_clients=20, alpha=0.1", "n_clients=4, alpha=1.0"), names)
    assert names["record"].accuracy_client_mean > 0.8


def test_the_method_of_the_contributing_page_keeps_the_contract(tmp_path):
    (block,) = python_blocks("CONTRIBUTING.md")
    (tmp_path / "mine.py").write_text(block)  # its last line checks it
    assert load_method(f"{tmp_path}/mine.py:Mine").gamma == 10.0


def prose(text: str) -> list[tuple[int, str]]:
    """The numbered lines of a page that are sentences: no code, no tables, and links without their addresses."""
    lines, in_code = [], False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            in_code = not in_code
        elif not in_code and not line.lstrip().startswith("|"):
            lines.append((number, re.sub(r"\]\([^)]*\)", "]", line)))
    return lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_lines_of_a_page_have_at_most_120_characters(page):
    assert [number for number, line in prose(page.read_text()) if len(line) > 120] == []


def test_prose_leaves_out_code_tables_and_addresses_only():
    text = f"{'a' * 121}\n| {'b' * 121} |\n```console\n{'c' * 121}\n```\nsee [d]({'e' * 121})\n{'f' * 121}\n"
    assert [number for number, line in prose(text) if len(line) > 120] == [1, 7]


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out
