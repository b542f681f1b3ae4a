"""How long `import apfl` and the first answer of commands take: best of several fresh processes, wall and processor.

    python benchmarks/start.py

On a quiet machine `import apfl` should stay under 0.3 s and `apfl --help` under 0.6 s.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

REPEATS = 5
MAIN = "from apfl.cli import main; main()"
CALLS = {
    "import apfl": ["-c", "import apfl"],
    "import torch": ["-c", "import torch"],
    **{
        f"apfl {words}": ["-c", MAIN, *words.split()]
        for words in (
            "--version",
            "--help",
            "run --help",
            "methods",
            "doctor",
            "federate --help",
            "federate keys --help",
            "federate status --help",
            "federate join --help",
        )
    },
}
LIMITS = {"import apfl": 0.3, "apfl --help": 0.6}


def seconds(call: list[str]) -> tuple[float, float]:
    """Wall and processor seconds of a fresh process, children included."""
    before, begun = os.times(), time.perf_counter()
    subprocess.run([sys.executable, *call], check=True, stdout=subprocess.DEVNULL)
    wall, after = time.perf_counter() - begun, os.times()
    return wall, after.children_user + after.children_system - before.children_user - before.children_system


if __name__ == "__main__":
    for name, call in CALLS.items():
        wall, processor = (min(column) for column in zip(*(seconds(call) for _ in range(REPEATS)), strict=True))
        limit = f"  (limit {LIMITS[name]} s)" if name in LIMITS else ""
        print(f"{name:<28} {wall:5.2f} s wall {processor:5.2f} s processor{limit}", flush=True)
