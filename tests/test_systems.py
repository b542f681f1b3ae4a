"""Runs, the estimator and `apfl doctor` need nothing that only POSIX has. (Nothing here runs on Windows or macOS.)"""

from __future__ import annotations

import subprocess
import sys

ELSEWHERE = """
import os, sys
import numpy, scipy.linalg, sklearn.linear_model, torch, matplotlib, rich.console  # they have their own ways

for name in ("fcntl", "resource", "termios", "pwd", "grp"):
    sys.modules[name] = None  # an import of it fails
for name in ("sched_getaffinity", "geteuid", "getuid", "fork", "umask", "mkfifo"):
    delattr(os, name)

import builtins, io, pathlib
opened = io.open
def without_proc(file, *more, **options):
    if str(file).startswith(("/proc/meminfo", "/proc/self/net")):
        raise FileNotFoundError(file)
    return opened(file, *more, **options)
builtins.open = io.open = without_proc
"""

RUN = """
import apfl
from sklearn.datasets import load_digits
X, y = load_digits(return_X_y=True)
narrow = {"apfl": {"d_primary": 64}}
results = apfl.run("digits", ["local_ridge", "apfl"], clients=4, seeds=1, settings=narrow, out="run")
assert results.model("apfl", client=1).predict(X[:3]).shape == (3,)
results.report("report.html")
clf = apfl.APFLClassifier(d_primary=64, d_refinement=64).fit(X[:200], y[:200], clients=y[:200] % 2)
assert clf.predict(X[:3], clients=y[:3] % 2).shape == (3,)
from apfl.cli import main
for words in (["predict", "run/models/apfl/seed-0/client-1.safetensors", "digits"], ["doctor"]):
    try:
        main(words)
    except SystemExit as stopped:
        assert not stopped.code, words
"""


def test_nothing_that_only_posix_has_is_needed(tmp_path):
    code = [sys.executable, "-c", ELSEWHERE + RUN]
    done = subprocess.run(code, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "does not say how much is free" in done.stdout
    assert (tmp_path / "report.html").exists()


def test_what_is_taken_away_is_away():
    code = [sys.executable, "-c", ELSEWHERE + "import fcntl"]
    assert "ModuleNotFoundError" in subprocess.run(code, capture_output=True, text=True).stderr
