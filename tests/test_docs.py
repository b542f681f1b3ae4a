"""What the documentation shows, runs."""

from __future__ import annotations

import json
import re
import runpy
import shlex
from pathlib import Path

import jinja2
import numpy as np
import pytest
import torch
import typer
from sklearn.datasets import load_digits

from apfl import DualStream, load_method, solve, statistics
from apfl.cli.app import app as apfl_app

ROOT = Path(__file__).parents[1]
FIGURES = ("streams.svg", "sees.svg", "speed.svg")
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "results").glob("*.md")])


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def test_from_the_readme_to_a_table_of_ones_own_data_with_a_plot(tmp_path, monkeypatch, capsys):
    """The way in for researchers: the README's own lines, first on the digits, then on rows of one's own."""
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    X, y = X[:400], y[:400]
    site = np.array(["hospital-a", "hospital-b"])[np.arange(400) % 2]
    names = {"X": X, "y": y, "site": site, "X_new": X}
    first, own = python_blocks("README.md")
    exec(first.replace("clients=10, alpha=0.1, seeds=3", "clients=4, alpha=0.5, seeds=1"), names)
    assert set(names["predicted"]) <= set("0123456789")
    exec(own.replace("seeds=3", "seeds=1"), names)
    assert [record.client_names for record in names["mine"].records] == [["hospital-a", "hospital-b"]] * 2
    assert "apfl minus" in capsys.readouterr().out
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("clients.png", "report.html", "gains.png"))


def test_the_readme_shows_what_its_lines_print():
    (shown,) = re.findall(r"```text\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    printed = runpy.run_path(str(ROOT / "scripts" / "numbers"))["digits"]().removeprefix("```text\n")
    now, then = (accuracies(text) for text in (printed, shown))
    assert list(now) == list(then)
    assert now == pytest.approx(then, abs=0.3)  # another BLAS may round a few of 450 test rows over the line
    heads = [[line.split() for line in text.splitlines()[:2]] for text in (printed, shown)]
    assert heads[0] == heads[1], "run scripts/numbers"


def accuracies(table: str) -> dict[str, float]:
    """The first number of each method's row."""
    return {name: float(number) for name, number in re.findall(r"^ (\w+) +([0-9.]+) ", table, re.MULTILINE)}


def test_the_numbers_of_the_readme_are_those_of_the_records():
    numbers = runpy.run_path(str(ROOT / "scripts" / "numbers"))
    text = (ROOT / "README.md").read_text()
    assert numbers["current"](text, {"cifar100"}) == text, "run scripts/numbers"
    assert {name for _, name, _ in numbers["BLOCK"].findall(text)} == {"digits", "cifar100"}
    assert numbers["current"](text.replace("87.7", "99.9"), {"cifar100"}) == text


def test_the_seconds_of_the_benchmarks_are_those_of_the_record():
    numbers = runpy.run_path(str(ROOT / "scripts" / "numbers"))
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    assert [name for _, name, _ in numbers["BLOCK"].findall(text)] == ["speed"]
    assert numbers["current"](text, {"speed"}) == text, "run scripts/numbers"
    told = json.loads((ROOT / "docs" / "results" / "records" / "bench.json").read_text())
    drawn = re.findall(r"<text[^>]*>([^<]+)<", (ROOT / "docs" / "images" / "speed.svg").read_text())
    for name, found in told["peers"].items():  # the picture says what the record says, whatever draws it
        assert name in drawn
        assert any(words.startswith(f"{found['seconds']:.2g} s") for words in drawn), name


def test_snippets_of_the_python_page_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    X, y = load_digits(return_X_y=True)
    X, y = X[:200], y[:200]
    site = np.array(["hospital-a", "hospital-b"])[np.arange(200) % 2]
    names = {"X": X, "y": y, "site": site, "X_new": X, "site_new": site}
    estimator, weights, regressor, labels, pieces = python_blocks("docs/python.md")
    exec(estimator, names)
    exec(weights, dict(names, w=np.arange(200.0)))
    exec(regressor, dict(names, y=X[:, 20]))
    exec(labels, {})
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
    objects, block = python_blocks("docs/running.md")
    site = np.array(["north", "south"])[np.arange(900) % 2]
    given: dict[str, object] = {"X": X[:900], "y": y[:900], "site": site}
    exec(objects, given)
    assert [record.n_clients for record in given["results"].records] == [2, 2]
    assert given["by_hand"].records[0].partition == "halves"
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


def attacks() -> list[list[str]]:
    """The rows of the threat model's table: attack, result, defence, test."""
    page = (ROOT / "docs" / "threat-model.md").read_text()
    head, _, *rows = page.partition("\n## Attacks tried\n")[2].partition("\n| ")[2].split("\n\n")[0].splitlines()
    assert head == "attack | result without the defence | defence | test |"
    return [[cell.strip() for cell in row.strip("|").split(" | ")] for row in rows]


def test_every_attack_in_the_threat_model_names_tests_that_exist():
    rows = attacks()
    assert len(rows) >= 30
    assert all(len(row) == 4 and all(row) for row in rows)
    for row, _, _, tests in rows:
        named = re.findall(r"`(federate/[\w/]+\.py)(?:::(\w+))?`", tests)
        assert named or tests == "the same", row
        for file, test in named:
            source = (ROOT / "tests" / file).read_text()
            assert f"\ndef {test}(" in source if test else "\ndef test_" in source, (row, file, test)


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_run(path, capsys):
    runpy.run_path(str(path), run_name="__main__")
    assert capsys.readouterr().out


def test_the_method_of_the_guides_runs():
    (block,) = [block for block in python_blocks("docs/howto.md") if "apfl.Method" in block]
    names: dict[str, object] = {}
    exec(block, names)
    assert [record.method for record in names["results"].records] == ["Mine", "local_ridge"]


def test_the_masked_sum_of_the_docs_runs(capsys):
    pytest.importorskip("cryptography", reason="masked sums need cryptography, which comes with the extra flower")
    (block,) = python_blocks("docs/masks.md")
    exec(block, {})
    assert capsys.readouterr().out.startswith("[   12    -4 80000]")


def test_every_python_block_is_run_by_a_test():
    """README, CONTRIBUTING, running, python, howto, masks: above. features: tests/data. laptop: tests/federate."""
    with_blocks = {page.relative_to(ROOT).as_posix() for page in PAGES if "```python" in page.read_text()}
    run = {f"docs/{name}.md" for name in ("features", "howto", "laptop", "masks", "python", "running")}
    assert with_blocks == run | {"README.md", "CONTRIBUTING.md"}


def anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as GitHub and MyST make them."""
    heads = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", head).lower()).replace(" ", "-") for head in heads}


def broken(page: Path, text: str) -> list[str]:
    """The links of a page that lead nowhere. Tutorials are made by the docs' build, from scripts."""
    found = []
    prose_only = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose_only):
        path, _, anchor = link.partition("#")
        if re.match(r"\w+:", link):
            continue
        goal = (page.parent / path).resolve() if path else page
        made = re.fullmatch(r"(?:docs/)?tutorials/(\w+)\.rst", path)
        if made:
            goal = ROOT / "examples" / "tutorials" / ("README.rst" if made[1] == "index" else f"{made[1]}.py")
        if not goal.exists() or (anchor and goal.suffix == ".md" and anchor not in anchors(goal)):
            found.append(link)
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_within_the_repository_lead_somewhere(page):
    assert broken(page, page.read_text()) == []


def test_broken_links_are_noticed():
    page = ROOT / "docs" / "index.md"
    text = "[a](no.md) [b](faq.md#no) [c](faq.md#accuracy) [d](tutorials/no.rst) [e](https://x.org) `[f](g)`"
    assert broken(page, text) == ["no.md", "faq.md#no", "tutorials/no.rst"]


def commands(text: str) -> list[list[str]]:
    """The calls of apfl in a page's console blocks, as words; what a page leaves open with … is cut off."""
    blocks = re.findall(r"```console\n(.*?)```", text, re.DOTALL)
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    calls = [call for line in lines for call in re.findall(r"(?:^\S*\$ |&& |bin/|exec \S+ )apfl (.+)", line)]
    return [shlex.split(call.partition("   #")[0].partition(" && ")[0].replace("…", "x")) for call in calls]


def unknown_words(words: list[str]) -> list[str]:
    """The commands and options of a call that apfl does not have."""
    command = typer.main.get_command(apfl_app)
    while getattr(command, "commands", None) and words and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[:1]
        command, words = command.commands[words[0]], words[1:]
    known = {name for each in command.params for name in (*each.opts, *each.secondary_opts)} | {"--help"}
    return [word for word in words if word.startswith("--") and word not in known]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_and_options_on_a_page_exist(page):
    if page.name != "CHANGELOG.md":
        assert [found for words in commands(page.read_text()) if (found := unknown_words(words))] == []


def test_unknown_commands_and_options_are_noticed():
    page = "```console\n$ apfl run --data x --no-such   # why\nserver$ apfl federate stop x\n$ .venv/bin/apfl rum\n```"
    assert [unknown_words(words) for words in commands(page)] == [["--no-such"], ["stop"], ["rum"]]
    assert len(commands((ROOT / "README.md").read_text())) >= 7


@pytest.mark.parametrize("name", FIGURES)
def test_pictures_are_what_the_script_draws(tmp_path, name):
    runpy.run_path(str(ROOT / "scripts" / "pictures"))["main"](tmp_path)
    drawn, kept = ((folder / name).read_text() for folder in (tmp_path, ROOT / "docs" / "images"))
    words = re.compile(r"<text[^>]*>([^<]+)<")
    assert words.findall(drawn) == words.findall(kept), "run scripts/pictures"
    assert len(words.findall(drawn)) > 10


def test_the_version_switch_leads_to_the_same_place_of_each_version():
    template = jinja2.Template((ROOT / "docs" / "_templates" / "versions.html").read_text())
    versions = [{"name": "0.2.0", "address": "../0.2.0/"}, {"name": "0.1.0", "address": "../0.1.0/"}]
    shown = template.render(versions=versions, release="0.1.0", pathto=lambda name, whole: "../")
    options = re.findall(r'<option value="([^"]+)"( selected)?>([^<]+)<', shown)
    assert options == [("../../0.2.0/", "", "0.2.0"), ("../../0.1.0/", " selected", "0.1.0")]
    assert template.render(versions=[]).strip() == "", "one version needs no switch"
