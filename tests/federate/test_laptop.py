"""The way in for engineers: every command of docs/laptop.md, in its order, with processes of their own."""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.federate.world import APFL, World, world

PAGE = Path(__file__).parents[2] / "docs" / "laptop.md"
STAYS = ("federate server", "federate join")  # commands that keep running
BLOCK = re.compile(r"```(python|console)\n(.*?)```", re.DOTALL)


def calls(page: str) -> list[tuple[str, str]]:
    """Each command of the page's console blocks, and what the page says that it prints."""
    found: list[tuple[str, str]] = []
    for kind, text in BLOCK.findall(page):
        if kind == "console":
            commands = re.findall(r"^\$ (apfl .*)\n((?:(?!\$ ).*\n)*)", text, re.MULTILINE)
            found += [(command, printed.strip()) for command, printed in commands]
    return found


def masked(text: str) -> list[str]:
    """Lines without what differs from run to run: numbers, hashes, spaces, and the order in which sites answer."""
    lines = (re.sub(r"\b[abc]\b", "SITE", " ".join(line.split())) for line in text.splitlines() if line.strip())
    return [re.sub(r"\b[0-9a-f]{6,}…?|[0-9][0-9.e+:-]*|[─━]+", "#", line) for line in lines]


def test_the_page_names_four_processes_and_predictions_at_each_site():
    commands = [command for command, _ in calls(PAGE.read_text())]
    assert sum(command.startswith(tuple(f"apfl {each}" for each in STAYS)) for command in commands) == 4
    assert sum(command.startswith("apfl predict") for command in commands) == 3


def test_masks_hide_numbers_and_nothing_else():
    assert masked("site a  sent 512 rows (4f1c9a7d)") == masked("site b sent 7 rows (00ffaa11)")
    assert masked("left") != masked("joined")
    shown = [line for _, printed in calls(PAGE.read_text()) for line in masked(printed)]
    assert "difference to recomputing from the remaining contributions: #" in shown
    assert len(shown) > 30


@pytest.mark.deployment
def test_every_command_of_the_page_works_and_prints_what_the_page_says(tmp_path, monkeypatch):
    pytest.importorskip("flwr")
    monkeypatch.chdir(tmp_path)
    page = PAGE.read_text()
    (code,) = [text for kind, text in BLOCK.findall(page) if kind == "python"]
    exec(code, {})
    with world(tmp_path, ["unused"], secure=False) as w:
        for command, printed in calls(page):
            said = call(w, command)
            print(f"$ {command}\n{said}")
            lines = iter(masked(said))
            missing = [line for line in masked(printed) if line not in lines]  # in this order, among others
            assert missing == [], command
    for name in "abc":
        assert accuracy(tmp_path / f"{name}.csv", tmp_path / f"{name}.npz") > 0.85, name


def accuracy(predictions: Path, rows: Path) -> float:
    """The share of the test rows of a site that its own model predicted right."""
    with predictions.open() as file, np.load(rows) as truth:
        return float(np.mean([row["predicted"] for row in csv.DictReader(file)] == truth["labels"][truth["test"]]))


def call(w: World, command: str) -> str:
    """Run a command of the page; what it printed. One that stays is started, and waited for until it is ready."""
    words = shlex.split(command.replace("127.0.0.1:9091", f"127.0.0.1:{w.port}"))[1:]
    if not command.startswith(tuple(f"apfl {each}" for each in STAYS)):
        wide = {**os.environ, "COLUMNS": "110"}
        done = subprocess.run([*APFL, *words], env=wide, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout + done.stderr
    role = words[words.index("--name") + 1] if "join" in words else "server"
    w.start(role, [*words, "--port", w.port] if role == "server" else words)
    if role == "server":
        w.until(lambda: "ready" in w.log("server"), "the server")
    else:
        w.connected(role)
    return w.log(role)
