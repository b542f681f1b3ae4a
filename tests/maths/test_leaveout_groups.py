"""Left-out scores of groups: equal to refitting, to the definition, and to those of rows."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor

from apfl.maths import leaveout_groups
from apfl.maths.leaveout import MOST_LEVERAGE, HatBasis, LeftOut, hat_basis, leverage_sketch, whiten
from apfl.maths.ridge import factorise, statistics
from tests.maths.test_ridge import augmented_lstsq, rows

# Two sizes that share a block (4 and 3), several of one size, and one group with half of all rows; rows are shuffled.
MIXED = torch.repeat_interleave(
    torch.tensor([9, 3, 4, 8, 1, 2, 7, 0, 6, 5]), torch.tensor([1, 1, 1, 2, 2, 5, 4, 3, 1, 18])
)
MIXED = MIXED[torch.randperm(len(MIXED), generator=torch.Generator().manual_seed(0))]
N = len(MIXED)


@pytest.fixture(params=["one block a size", "many blocks"])
def blocks(request, monkeypatch):
    if request.param != "one block a size":
        monkeypatch.setattr(leaveout_groups, "BLOCK_ROWS", 4)


def members(groups: Tensor) -> list[Tensor]:
    return [torch.nonzero(groups == name)[:, 0] for name in torch.unique(groups)]


@pytest.mark.parametrize(
    ("d_primary", "d_refinement", "others", "groups"),
    [
        (60, 50, 20, MIXED),  # wider than any group
        (7, 6, 20, MIXED),  # narrower than the large one, in both streams
        (3, 2, 0, MIXED),  # narrower than most, and no other client
        (7, 50, 0, torch.zeros(N)),  # the client is one group, and alone: nothing is left
        (50, 7, 9, torch.zeros(N)),  # nothing of the client is left
        (7, 50, 0, torch.arange(N) // 19),  # two large groups: without both nothing is left
    ],
)
@pytest.mark.usefixtures("blocks")
def test_groups_of_all_sizes_are_left_out_as_by_refitting(d_primary, d_refinement, others, groups):
    gamma, c, betas = 0.7, 3, (0.05, 2.0, 1e20)
    phi, y = rows(N + others, d_primary, c, 0)
    psi, _ = rows(N, d_refinement, c, 1)
    factor = factorise(statistics(phi, y), gamma)
    residual = y[:N] - phi[:N] @ torch.cholesky_solve(phi.T @ y, factor)
    left_out = LeftOut(hat_basis(psi), whiten(phi[:N], factor), residual, groups)
    assert left_out.clipped == 0

    def primary_without(gone: Tensor) -> Tensor:
        keep = torch.ones(N + others, dtype=torch.bool)
        keep[gone] = False
        return augmented_lstsq(phi[keep], y[keep], gamma)

    parts, scores = members(groups), [left_out.refinement(beta) for beta in betas]
    for out in parts:
        again = primary_without(out)
        torch.testing.assert_close(left_out.primary[out], y[out] - phi[out] @ again, rtol=1e-9, atol=1e-9)
        targets = y[:N] - phi[:N] @ again
        stay = torch.ones(N, dtype=torch.bool)
        stay[out] = False
        for beta, score in zip(betas, scores, strict=True):
            refitted = psi[out] @ augmented_lstsq(psi[stay], targets[stay], beta)
            torch.testing.assert_close(score[out], refitted, rtol=1e-9, atol=1e-9)


def sketched(groups: Tensor | None, m: int = 6) -> LeftOut:
    """With a sketch so narrow that it takes leverages past 1."""
    phi, y = rows(N + 15, 30, 3, 0)
    psi, _ = rows(N, 20, 3, 1)
    factor = factorise(statistics(phi, y), 0.5)
    residual = y[:N] - phi[:N] @ torch.cholesky_solve(phi.T @ y, factor)
    return LeftOut(hat_basis(psi), phi[:N] @ leverage_sketch(factor, m, 0), residual, groups, sketched=True)


def by_pairs(left_out: LeftOut, groups: Tensor, beta: float) -> Tensor:
    """The definition, one pair of groups after the other."""
    u, shrink, e = left_out.hat.basis, left_out.hat.shrink(beta), left_out.residual
    primary_hat, hat = left_out.whitened @ left_out.whitened.T, (u * shrink) @ u.T
    result = torch.zeros_like(e)
    for g in members(groups):
        values, vectors = torch.linalg.eigh(primary_hat[g][:, g])
        gone = (vectors / (1 - values.clamp_max(MOST_LEVERAGE))) @ (vectors.T @ e[g])
        for j in members(groups):
            if not torch.equal(j, g):
                result[g] += hat[g][:, j] @ (e[j] + primary_hat[j][:, g] @ gone)
        result[g] = torch.linalg.solve(torch.eye(len(g), dtype=torch.float64) - hat[g][:, g], result[g])
    return result


@pytest.mark.parametrize("most", [4, 1024])
def test_blocks_are_few_and_little_larger_than_the_rows_they_hold(monkeypatch, most):
    monkeypatch.setattr(leaveout_groups, "BLOCK_ROWS", most)
    none = torch.zeros(N, 1).double()
    blocks = leaveout_groups.Groups(MIXED, none, none, none, 1.0)._blocks
    assert sum(b.count * b.size for b in blocks) <= 2**0.5 * N
    assert all(b.count == 1 or b.count * b.size <= most for b in blocks)
    if most > N:
        assert len(blocks) == 5  # of sizes 1, 2, 3 and 4 together, 5, 18


@pytest.mark.parametrize("m", [3, 12, 48])
@pytest.mark.usefixtures("blocks")
def test_a_sketch_is_clipped_group_by_group(m):
    left_out = sketched(MIXED, m)
    assert left_out.clipped > 0
    for beta in (0.05, 2.0):
        expected = by_pairs(left_out, MIXED, beta)
        torch.testing.assert_close(left_out.refinement(beta), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("m", [6, 24])
@pytest.mark.usefixtures("blocks")
def test_groups_of_one_row_are_rows(m):
    names = torch.randperm(N, generator=torch.Generator().manual_seed(1)) - 5
    by_row, by_group = sketched(None, m), sketched(names, m)
    assert 0 < by_row.clipped < 1
    assert torch.equal(by_row.clipped_rows, by_group.clipped_rows)
    torch.testing.assert_close(by_row.primary, by_group.primary, rtol=1e-10, atol=1e-10)
    for beta in (1e-4, 0.05, 2.0):
        torch.testing.assert_close(by_row.refinement(beta), by_group.refinement(beta), rtol=1e-10, atol=1e-10)
        expected = by_pairs(by_row, names, beta)
        torch.testing.assert_close(by_row.refinement(beta), expected, rtol=1e-9, atol=1e-9)


def test_rows_that_the_primary_has_not_seen_do_not_move_it():
    """Their V is zero, and so is all that they share with others: alone, in a small group and in the large one."""
    seen = ~torch.isin(MIXED, torch.tensor([9, 8, 5]))
    left_out = sketched(MIXED, 3)
    left_out = dataclasses.replace(left_out, whitened=left_out.whitened * seen[:, None])
    assert torch.equal(left_out.primary[~seen], left_out.residual[~seen])
    torch.testing.assert_close(left_out.refinement(0.5), by_pairs(left_out, MIXED, 0.5), rtol=1e-9, atol=1e-9)


def test_clipped_rows_have_a_leverage_above_the_bound_or_their_group_an_eigenvalue():
    # Rows of one direction and squared length q make an eigenvalue of q times their number.
    groups = torch.tensor([3, 1, 2, 1, 4, 4, 4])
    q = torch.tensor([0.98, 0.995 / 2, 0.995, 0.995 / 2, 0.98 / 3, 0.98 / 3, 0.98 / 3], dtype=torch.float64)
    whitened = torch.nn.functional.one_hot(groups).double() * q.sqrt()[:, None]
    hat, residual = hat_basis(whitened), whitened[:, :2]
    by_row, by_group = (LeftOut(hat, whitened, residual, groups=g, sketched=True) for g in (None, groups))
    assert by_row.clipped_rows.tolist() == [i == 2 for i in range(7)]
    assert by_group.clipped_rows.tolist() == [i in (1, 2, 3) for i in range(7)]
    assert (by_row.clipped, by_group.clipped) == (1 / 7, 3 / 7)
    assert LeftOut(hat, whitened, residual, groups=groups).clipped == 0


def test_a_hat_basis_is_orthonormal_whatever_the_spectrum():
    """Eigenvalues of 1e-9 of the largest are wrong in the seventh digit."""
    u, _, w = torch.linalg.svd(rows(40, 12, 3, 0)[0], full_matrices=False)
    lengths = torch.logspace(0, -4.5, 12, dtype=torch.float64)
    hat: HatBasis = hat_basis((u * lengths) @ w)
    torch.testing.assert_close(hat.basis.square().sum(0), torch.ones(12, dtype=torch.float64), rtol=1e-12, atol=0)
    # Rounding of psi itself moves its shortest direction by 1e-16 / 1e-4.5.
    torch.testing.assert_close(hat.values.sqrt().flip(0), lengths, rtol=1e-10, atol=0)


@pytest.mark.parametrize(("n", "d"), [(6, 3), (3, 6)])
def test_a_hat_basis_has_as_many_values_as_the_rows_have_directions(n, d):
    assert not hat_basis(torch.zeros(n, d)).values.any()
    psi, _ = rows(n, d, 2, 0)
    assert int((hat_basis(psi).values > 0).sum()) == 3
    psi[1:] = psi[0]
    alike = hat_basis(psi)
    assert int((alike.values > 0).sum()) == 1
    torch.testing.assert_close(alike.values.sum(), psi.square().sum())
    assert bool(torch.isfinite(alike.basis).all())
