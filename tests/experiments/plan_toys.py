"""Small plans for the tests of `apfl bench`."""

from __future__ import annotations

SMALL = """
seeds = [0, 1]
checkpoint_seconds = 0

[protocol]
n_clients = 4
alpha = 1.0

[methods.afl]
"""
