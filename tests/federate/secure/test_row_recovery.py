"""The attack of examples/attacks.py: a plain upload gives its rows away, a masked one does not."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
import torch

from apfl import random_map

example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "attacks.py"))
Attack, integers, recovered, symmetric = (example[name] for name in ("Attack", "integers", "recovered", "symmetric"))

N, D = 12, 100


@pytest.fixture(scope="module")
def uploads():
    """Three sites of 12 digits each under a map of 100 columns: rows and Phi'Phi of each."""
    phi = random_map(64, D, activation="hardswish", seed=0)
    everyone = [rows for rows, _ in example["sites"](3, N)]
    return phi, everyone, [integers(phi, rows) for rows in everyone]


def test_every_row_comes_back_from_a_plain_upload(uploads):
    phi, everyone, sent = uploads
    found = Attack(phi, symmetric(sent[0]), N).run()
    assert recovered(found, everyone[0]) == N
    assert recovered(found, everyone[1]) == 0


def test_every_row_comes_back_from_a_sum_that_is_too_wide(uploads):
    phi, everyone, sent = uploads
    found = Attack(phi, symmetric(sent[0] + sent[1]), 2 * N).run()
    assert recovered(found, torch.cat(everyone[:2])) > N  # both sites' rows; the last few may need more starts


def test_no_row_comes_back_from_a_masked_upload(uploads):
    pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")
    phi, everyone, sent = uploads
    masked, total = example["masked_upload"](sent)
    assert (total == sum(sent)).all()
    found = Attack(phi, symmetric(masked), N).run()
    assert recovered(found, torch.cat(everyone)) == 0
