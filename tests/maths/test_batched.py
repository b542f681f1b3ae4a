"""Hits, left-out scores and refinements of all settings at once are those of one setting after another."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import apfl.maths.hits as hits_room
import apfl.maths.machine as machine_room
import apfl.maths.personalise as personalise_room
from apfl.maths.hat import HatFactors, fit_refinement, hat_basis, hat_of
from apfl.maths.hits import Grid, bounded, hits, left_out_prior, narrowed, summed
from apfl.maths.leaveout import LeftOut, leverage_sketch
from apfl.maths.personalise import Choice, Rows, Shared, leave_out, personalise, refine, solve_primary
from apfl.maths.refine import leave_out_each, left_out_of, refine_each, stacked
from apfl.maths.ridge import one_hot, statistics
from tests.maths.test_ridge import rows

TRIED = Grid([0.3, 3.0, 30.0], [0.0, 0.4, 0.9, 1.3], [0.0, 0.05, 0.25])


def draw(n: int, d: int, c: int, seed: int) -> tuple[LeftOut, torch.Tensor, torch.Tensor]:
    """A client of n rows beside others, its labels, and everyone's counts."""
    phi, y = rows(n + 40, d, c, seed)
    primary = solve_primary(statistics(phi, y), 1.0)
    residual = y[:n] - phi[:n] @ primary.weights
    left = LeftOut(hat_basis(phi[:n].tanh()), phi[:n] @ leverage_sketch(primary.factor, 8, 0), residual, sketched=True)
    return left, y[:n].argmax(1), y.sum(0)


def one_by_one(left: LeftOut, labels: torch.Tensor, everyone: torch.Tensor, tried: Grid) -> tuple[torch.Tensor, ...]:
    """The table, and how many rows are so near to a tie that single precision may decide otherwise, in float64."""
    own = one_hot(labels, len(everyone))
    prior = left_out_prior(own, own.sum(0), everyone, left.groups, 0.03)
    sure, near = torch.zeros(tried.shape, dtype=torch.int64), torch.zeros(tried.shape, dtype=torch.int64)
    for b, beta in enumerate(tried.betas):
        for k, balance in enumerate(tried.balances):
            for t, tau in enumerate(tried.taus):
                scores = own - left.primary + balance * left.refinement(beta) + tau * prior
                others = scores.masked_fill(own.bool(), -torch.inf).amax(1)
                margin = (scores.gather(1, labels[:, None])[:, 0] - others)[left.judged]
                sure[b, k, t] = (margin > 1e-5).sum()
                near[b, k, t] = (margin.abs() <= 1e-5).sum()
    return sure, near


@given(st.integers(2, 40), st.integers(2, 30), st.integers(2, 6), st.integers(0, 99), st.sampled_from([1, 40, 2**18]))
def test_hits_are_those_of_one_setting_after_another(n, d, c, seed, block):
    left, labels, everyone = draw(n, d, c, seed)
    before, hits_room.ENTRIES = hits_room.ENTRIES, block
    try:
        table = hits(left, labels, one_hot(labels, c).sum(0), everyone, 0.03, TRIED)
    finally:
        hits_room.ENTRIES = before
    sure, near = one_by_one(left, labels, everyone, TRIED)
    assert bool(((sure <= table) & (table <= sure + near)).all())


def test_balances_may_stand_in_any_order():
    left, labels, everyone = draw(30, 10, 4, 0)
    counts = one_hot(labels, 4).sum(0)
    mixed = Grid(TRIED.betas, [0.9, 0.0, 1.3, 0.4], TRIED.taus)
    table = hits(left, labels, counts, everyone, 0.03, TRIED)
    assert torch.equal(hits(left, labels, counts, everyone, 0.03, mixed), table[:, [2, 0, 3, 1]])
    assert len(table.unique()) > 3  # it could have gone wrong


class Given:
    """Left-out rows whose scores are given outright."""

    groups = None

    def __init__(self, primary: list[list[float]], refined: list[list[float]]) -> None:
        self.own = one_hot(torch.zeros(len(primary), dtype=torch.long), len(primary[0]))
        self.primary = self.own - torch.tensor(primary, dtype=torch.float64)
        self.refined = torch.tensor(refined, dtype=torch.float64)
        self.judged = torch.ones(len(primary), dtype=torch.bool)

    def refinements(self, betas: list[float]) -> torch.Tensor:
        return torch.stack([self.refined for _ in betas])


@pytest.mark.parametrize(
    ("primary", "refined", "right"),
    [
        ([2.0, 1.0], [0.0, 0.0], [1, 1, 1]),  # nothing to gain: the lead decides
        ([1.0, 1.0], [0.0, 0.0], [0, 0, 0]),  # a tie is no hit
        ([1.0, 2.0], [0.0, 0.0], [0, 0, 0]),
        ([1.0, 1.0], [1.0, 0.0], [0, 1, 1]),  # a tie at balance 0 alone
        ([1.0, 1.5], [1.0, 0.0], [0, 0, 1]),  # a tie at 0.5
        ([1.5, 1.0], [0.0, 1.0], [1, 0, 0]),
        ([1.0, 1.0], [1e-20, 0.0], [0, 1, 1]),  # however small the gain
        ([1.0, 1.0], [1e-42, 0.0], [0, 0, 0]),  # but for one that single precision nearly rounds away
        ([2.0, 1.0], [0.0, 1e-42], [1, 1, 1]),
        ([1.0, 1.0], [0.0, 1e-20], [0, 0, 0]),
        ([1.5, 1.0, 1.5], [1.0, 1.0, 1.0], [0, 0, 0]),  # as much as the others: the tie stays
    ],
)
def test_a_row_is_right_between_its_ends(primary, refined, right):
    labels, even = torch.tensor([0]), torch.ones(len(primary), dtype=torch.float64)
    tried = Grid([1.0], [0.0, 0.5, 1.0], [0.0])
    assert hits(Given([primary], [refined]), labels, even, even, 0.03, tried)[0, :, 0].tolist() == right


@pytest.mark.parametrize(("n", "d"), [(12, 30), (30, 12), (20, 20)])
def test_a_refinement_from_the_decomposition_is_the_fitted_one(n, d):
    psi, y = rows(n, d, 3, 0)
    for beta in (0.01, 1.0, 100.0):
        torch.testing.assert_close(
            hat_basis(psi).fit(psi, y, beta), fit_refinement(psi, y, beta), rtol=1e-9, atol=1e-9
        )  # fmt: skip


def test_a_refinement_of_rows_that_repeat_is_the_fitted_one():
    """Then some directions of the decomposition have no length."""
    for psi, y in [rows(12, 30, 3, 0), rows(12, 14, 3, 0)]:
        psi, y = (torch.cat([each, each[:4]]) for each in (psi, y))
        assert int((hat_basis(psi).values > 0).sum()) == 12
        torch.testing.assert_close(hat_basis(psi).fit(psi, y, 0.1), fit_refinement(psi, y, 0.1), rtol=1e-9, atol=1e-9)


def personalised(clients, primary):
    asked = []

    def rows_of(k: int) -> Rows:
        asked.append(k)
        phi, y = clients[k]
        return Rows(phi, phi.tanh(), y.argmax(1))

    choice = Choice("auto", "auto", "auto", "federation", 0.03, "auto")
    made = personalise(rows_of, [len(y) for _, y in clients], primary, choice, 16, 0)
    return made, asked


def test_what_is_kept_between_hits_and_refinement_changes_nothing_but_rounding(monkeypatch):
    clients = [rows(n, 12, 3, seed) for seed, n in enumerate((8, 30, 12))]
    primary = solve_primary(statistics(*(torch.cat(each) for each in zip(*clients, strict=True))), 1.0)
    kept, once = personalised(clients, primary)
    monkeypatch.setattr(personalise_room, "MOST_KEPT", 0)
    again, twice = personalised(clients, primary)
    assert sorted(once) == [0, 0, 1, 2]  # the first is asked for its width, too
    assert sorted(twice) == [0, 0, 0, 1, 1, 2, 2]
    assert kept.account == again.account
    for own, other in zip(kept.clients, again.clients, strict=True):
        assert own.setting == other.setting
        assert own.weight == other.weight
        torch.testing.assert_close(own.refinement, other.refinement, rtol=1e-9, atol=1e-9)


SIZES = (2, 9, 30, 12, 11, 3)


def several(d: int, c: int, *, seen: bool = False) -> tuple[list[Rows], Shared]:
    """Clients of several sizes, some with more rows than columns, and a primary of all of them."""
    clients = [rows(n, d, c, seed) for seed, n in enumerate(SIZES)]
    primary = solve_primary(statistics(*(torch.cat(each) for each in zip(*clients, strict=True))), 1.0)
    mask = [torch.arange(len(y)) % 3 > 0 if seen else None for _, y in clients]
    made = [Rows(phi, phi.tanh(), y.argmax(1), seen=own) for (phi, y), own in zip(clients, mask, strict=True)]
    return made, primary.with_leverage(16, 0)


@pytest.mark.parametrize("seen", [False, True])
@pytest.mark.parametrize("d", [5, 12, 40])
def test_clients_at_once_are_those_one_after_another(d, seen):
    clients, shared = several(d, 4, seen=seen)
    weights = (1.0, 0.0, 0.3)
    together = leave_out_each(stacked(clients), shared, 0.03, TRIED, weights=weights, keep_scores=True)
    for own, other in zip(clients, together, strict=True):
        alone = leave_out(own, shared, 0.03, TRIED, weights=weights, keep_scores=True)
        assert (alone.n_rows, alone.n_copies, alone.n_unjudged) == (other.n_rows, other.n_copies, other.n_unjudged)
        assert alone.noise == other.noise
        assert alone.scores is not None
        assert other.scores is not None
        assert torch.equal(alone.scores.judged, other.scores.judged)
        for w in weights:
            assert torch.equal(alone.tables[w], other.tables[w])
            for beta in TRIED.betas:
                setting = (beta, 0.4, 0.05)
                torch.testing.assert_close(
                    alone.scores.at(setting, w), other.scores.at(setting, w), rtol=1e-9, atol=1e-9
                )  # fmt: skip


@pytest.mark.parametrize("alike", [True, False])
def test_refinements_at_once_are_those_one_after_another(alike):
    clients, shared = several(12, 4, seen=True)
    settings = (
        [(0.3, 0.5, 0.1)] * len(SIZES) if alike else [(0.3 * (k + 1), 0.5, 0.1 * (k % 2)) for k in range(len(SIZES))]
    )
    weights = [1.0] * len(SIZES) if alike else [k / 5 for k in range(len(SIZES))]
    together = refine_each(stacked(clients), shared, settings, 0.03, weights)
    for own, setting, weight, other in zip(clients, settings, weights, together, strict=True):
        alone = refine(own, shared, setting, 0.03, weight)
        assert (alone.setting, alone.weight) == (other.setting, other.weight) == (setting, weight)
        torch.testing.assert_close(alone.refinement, other.refinement, rtol=1e-9, atol=1e-9)
        assert (alone.prior is None) == (other.prior is None)
        if alone.prior is not None:
            torch.testing.assert_close(alone.prior, other.prior)


@given(st.integers(1, 12), st.integers(1, 16), st.integers(0, 99))
def test_factorisations_tell_what_a_decomposition_does(n, d, seed):
    """Those of a GPU, on this device: H, H E and diag(H C) of two clients at once, and their refinements."""
    psi, e = (torch.stack(each) for each in zip(*(rows(n, d, 3, seed + k) for k in range(2)), strict=True))
    v = 0.1 * torch.stack([rows(n, 4, 3, seed + 2 + k)[0] for k in range(2)])
    basis, factors = hat_basis(psi), HatFactors(psi @ psi.mT)
    for one, other in zip(basis.parts([0.1, 5.0], e, v), factors.parts([0.1, 5.0], e, v), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    betas = torch.tensor([0.1, 5.0], dtype=torch.float64)
    for hat in (basis, factors):
        for own, rows_, residual, beta in zip(hat.fit(psi, e, betas), psi, e, betas.tolist(), strict=True):
            torch.testing.assert_close(own, fit_refinement(rows_, residual, beta), rtol=1e-9, atol=1e-9)


def test_scores_with_and_without_a_primary_come_from_the_same_factorisations(monkeypatch):
    """As on a GPU, which would else factorise for each weight."""
    clients, shared = several(40, 4)
    together, weights, made = stacked(clients), (1.0, 0.0), []
    (want, *_) = leave_out_each(together, shared, 0.03, TRIED, weights=weights, keep_scores=True)
    parts = HatFactors.parts

    def noted(self, betas, *other):
        made.append(betas)
        return parts(self, betas, *other)

    monkeypatch.setattr(HatFactors, "parts", noted)
    factors = replace(together).decomposed(HatFactors(together.psi @ together.psi.mT))
    (found, *_) = leave_out_each(factors, shared, 0.03, TRIED, weights=weights, keep_scores=True)
    assert made == [tuple(TRIED.betas)]
    assert want.scores is not None
    assert found.scores is not None
    for w in weights:
        assert torch.equal(want.tables[w], found.tables[w])
        for beta in TRIED.betas:
            one, other = (each.at((beta, 0.4, 0.05), w) for each in (want.scores, found.scores))
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_every_client_is_in_one_bucket_with_others_of_its_size():
    sizes = [*range(1, 90), 3000, 2900, 1000, 980]
    buckets = personalise_room._buckets(sizes, torch.device("cpu"))
    assert sorted(k for bucket in buckets for k in bucket) == [*range(len(sizes))]
    assert max(map(len, buckets)) > 5
    for bucket in buckets:
        own = [sizes[k] for k in bucket]
        assert max(own) <= machine_room.ALIKE * min(own)
        assert len(own) == 1 or len(own) * max(own) <= personalise_room.ROWS_ON_A_CORE


def test_a_row_without_others_leaves_nothing_behind():
    """Were it rounding instead of zero, it would decide between classes that are level."""
    (phi, y), shared = rows(1, 12, 4, 0), several(12, 4)[1]
    for hat in (hat_basis(phi), HatFactors(phi @ phi.mT)):
        left = LeftOut(hat, shared.whitened(Rows(phi, phi, y.argmax(1))), y)
        assert not left.refinements(TRIED.betas).any()


@pytest.mark.gpu
def test_a_gpu_finds_what_a_cpu_does():
    clients, shared = several(40, 4)
    on_gpu = [Rows(*(each.cuda() for each in (own.phi, own.psi, own.labels))) for own in clients]
    told = Shared(*(each.cuda() for each in (shared.weights, shared.class_counts, shared.sketch)))
    here, there = (
        leave_out_each(stacked(r), s, 0.03, TRIED, keep_scores=True) for r, s in ((clients, shared), (on_gpu, told))
    )
    for own, other in zip(here, there, strict=True):
        assert torch.equal(own.table, other.table)
        for beta in TRIED.betas:
            one, two = own.scores.at((beta, 0.4, 0.05)), other.scores.at((beta, 0.4, 0.05)).cpu()
            torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9)


def test_clients_are_decomposed_side_by_side(monkeypatch):
    """A lock that all rows share, as `functools.cached_property` had until Python 3.12, would let the barrier break."""
    both = threading.Barrier(2, timeout=10)

    def meeting(psi, least):
        both.wait()
        return hat_of(psi, least)

    monkeypatch.setattr("apfl.maths.refine.hat_of", meeting)
    clients = [Rows(own := torch.randn(4, 3), own, torch.zeros(4, dtype=torch.int64)) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(lambda rows: rows.hat, clients)
    assert first is not second
    assert clients[0].hat is first  # once for each


def test_single_rows_are_left_out_to_single_precision():
    rng = torch.Generator().manual_seed(0)
    phi = torch.nn.functional.normalize(torch.randn(30, 50, generator=rng))
    labels = torch.randint(3, (30,), generator=rng)
    shared = Shared(
        torch.randn(50, 3, generator=rng).double(),
        torch.full((3,), 10.0),
        torch.randn(50, 8, generator=rng).double() / 9,
    )
    made = []
    for own in (phi, phi.double()):
        rows = Rows(own, own, labels)
        made.append(left_out_of(rows, shared).refinements([0.05, 1.0]))
        assert rows.times(shared.weights) is rows.times(shared.weights)  # for the next who asks
        assert not torch.equal(rows.times(shared.weights)[:, :1], rows.times(shared.sketch)[:, :1])
    # 1 - h is above 0.05 / 1.05: it amplifies the rounding of single precision, 6e-8, twentyfold.
    torch.testing.assert_close(made[0].double(), made[1], rtol=0, atol=2e-5)
    assert made[0].dtype == torch.float32


def test_narrow_tables_add_up_to_those_of_whole_numbers():
    """Ten thousand tables are there at once, in as few bytes as hold them; their sum has all it needs."""
    generator = torch.Generator().manual_seed(0)
    tables = [torch.randint(0, most, (2, 3, 4), generator=generator) for most in (5, 30_000, 40_000, 2**40) * 200]
    narrow = [narrowed(table) for table in tables]
    assert [table.dtype for table in narrow[:4]] == [torch.int16, torch.int16, torch.int32, torch.int64]
    assert torch.equal(summed(narrow), torch.stack(tables).sum(0))
    small = [narrowed(torch.full((1, 1, 1), 32_000)) for _ in range(300)]
    assert summed(small).item() == 300 * 32_000
    weighted = torch.rand(2, 2, 2, dtype=torch.float64, generator=generator)
    assert narrowed(weighted) is weighted


@pytest.mark.parametrize("n_clients", [2, 5])
def test_bounds_of_narrow_tables_are_those_of_whole_numbers(n_clients):
    generator = torch.Generator().manual_seed(0)
    n_rows = [40, 60_000, 7, 300, 33_000][:n_clients]
    tables = [torch.randint(0, n // 2, (2, 3, 4), generator=generator) for n in n_rows]
    narrow = bounded([narrowed(table) for table in tables], n_rows)
    assert [own.tolist() for own in narrow] == [own.tolist() for own in bounded(tables, n_rows)]
