"""The command line, called from tests."""

from __future__ import annotations

import pytest

from apfl.cli import main


def here(*arguments: object) -> int:
    """Run ``apfl`` in this process; its exit code."""
    with pytest.raises(SystemExit) as stopped:
        main([str(argument) for argument in arguments])
    return int(stopped.value.code or 0)
