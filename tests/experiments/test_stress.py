"""A fast sample of the stress suite; `benchmarks/stress.py` runs the whole of it."""

from __future__ import annotations

import pytest
import torch

from apfl.maths import gcv
from apfl.maths.leaveout import Leaving
from apfl.methods import _analytic as method
from tests.methods.head_toys import one_thread  # noqa: F401
from tests.stress import (
    FILES,
    SHARED,
    TROUBLES,
    Case,
    cases,
    doubled,
    draw,
    hits_of_apfl,
    hits_of_estimator,
    hits_of_federation,
    hits_of_random,
    judge,
)

pytestmark = pytest.mark.usefixtures("one_thread")
EACH = 2  # cases of each trouble


def quick(case: Case) -> bool:
    return case.n <= 1500 and case.n * case.n_features <= 100_000


def sample() -> list[Case]:
    """The first quick cases of each trouble, by a rule that knows no result; the same on every machine."""
    drawn = [case for case in cases(200, data=("made", "digits", "wine", "breast_cancer")) if quick(case)]
    drawn += doubled(drawn)
    return [case for trouble in TROUBLES for case in [c for c in drawn if c.trouble == trouble][:EACH]]


def of_files() -> list[Case]:
    """The first small case of each features file."""
    drawn = [case for case in cases(60, data=tuple(FILES)) if case.n <= 300]
    return [next(case for case in drawn if case.data == name) for name in FILES]


SAMPLE = sample()
SMALL = [case for case in SAMPLE if case.n <= 400][::4]
COPIED = [case for case in SAMPLE if case.n <= 400 and "twice" in case.trouble]


def params(some: list[Case]) -> list[object]:
    """Cases by their names."""
    return [pytest.param(case, id=str(case)) for case in some]


def test_the_sample_has_every_trouble():
    assert len(SAMPLE) == EACH * len(TROUBLES)
    assert {case.trouble for case in SAMPLE} == set(TROUBLES)


@pytest.mark.parametrize("case", params(SAMPLE))
def test_the_default_is_good_and_honest(case):
    verdict = judge(*draw(case))
    assert verdict.good, verdict
    assert verdict.honest, verdict


@pytest.mark.parametrize("case", params(of_files()))
def test_the_default_is_good_and_honest_with_features_of_images(case):
    if not (SHARED / FILES[case.data]).is_file():
        pytest.skip(f"{FILES[case.data]} is not in {SHARED}")
    test_the_default_is_good_and_honest(case)


@pytest.mark.parametrize("case", params(SMALL))
def test_random_maps_are_good_and_honest(case):
    verdict = judge(*draw(case), hits_of_random)
    assert verdict.good, verdict
    assert verdict.honest, verdict


@pytest.mark.parametrize("case", params(SMALL))
def test_the_estimator_is_good_and_honest(case):
    verdict = judge(*draw(case), hits_of_estimator)
    assert verdict.good, verdict
    assert verdict.honest, verdict


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_a_federation_is_as_good_as_the_method(case, tmp_path):
    train, test = draw(case)
    method_right, _ = hits_of_apfl(train, test)
    right = hits_of_federation(train, test, tmp_path)
    # Sites round by numbers that nobody else knows: of settings that are nearly level now one is chosen, now another.
    assert abs(int(right.sum()) - int(method_right.sum())) <= max(2, 0.02 * len(test))


def test_the_sample_notices_a_gamma_that_interpolates_copies(monkeypatch):
    """Without the bound on the degrees of freedom and with copies that nobody counts, a case fails."""
    assert all(judge(*draw(case), hits_of_random).good for case in COPIED)
    monkeypatch.setattr(gcv, "MOST_FITTED", 1.0)
    monkeypatch.setattr(
        method, "leaving", lambda x, y, groups, hashes: Leaving(groups, torch.zeros(len(x), dtype=torch.bool))
    )
    assert not all(judge(*draw(case), hits_of_random).good for case in COPIED)
