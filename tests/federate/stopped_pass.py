"""A pass that kills itself in the middle: `python -m tests.federate.stopped_pass TERMS OUT AFTER SHARD...`."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from apfl.cli.stats import _landmarks, _terms
from apfl.federate.stats.passes import Pass
from apfl.federate.stats.stages import stage_of


def main() -> None:
    terms, out, after, *shards = sys.argv[1:]
    agreed = _terms(Path(terms))

    def show(done: int, total: int) -> None:
        if done > int(after):
            os.kill(os.getpid(), signal.SIGKILL)

    stage = stage_of(agreed, _landmarks(agreed, Path(terms), None))
    none = dict.fromkeys(("label_column", "feature_column", "features", "drop"))
    Pass(stage, [Path(each) for each in shards], Path(out), none, show=show, every=0.0).run()


if __name__ == "__main__":
    main()
