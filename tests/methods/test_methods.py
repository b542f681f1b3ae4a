"""What every method must do, and what the analytic ones must equal."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.maths.machine import over_clients
from apfl.maths.ridge import one_hot, solve, statistics
from apfl.maths.wire import factor_message, message, nbytes
from apfl.methods import load_method, method_class, method_names
from apfl.methods.afl import smallest_ridge
from apfl.methods.local_ridge import left_out_ridge
from apfl.testing import check_method
from tests.conftest import draw_clients


def last_round(name: str, clients: list[Shard], n_classes: int, seed: int = 0, **settings):
    return list(load_method(name, **settings).rounds(clients, n_classes, seed))[-1]


def small(name: str) -> dict[str, int]:
    """Widths and rounds that keep the test quick, where the method has any."""
    sizes = {"d": 40, "d_block": 40, "blocks": 2, "d_primary": 40, "n_rounds": 12}
    return {field.name: sizes[field.name] for field in fields(method_class(name)) if field.name in sizes}


@pytest.mark.parametrize("name", method_names())
def test_every_method_keeps_the_contract(name):
    """Holds for every file in the methods folder, and for a method from outside by the same function."""
    check_method(load_method(name, **small(name)))


@given(st.lists(st.integers(1, 25), min_size=2, max_size=6), st.integers(0, 50))
def test_theorem_3_a_client_does_not_see_how_the_rest_is_spread(ns, seed):
    clients = draw_clients([8, *ns], 6, 3, seed)
    rest = Shard(torch.cat([s.features for s in clients[1:]]), torch.cat([s.labels for s in clients[1:]]))
    order = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))
    halves = order[: len(order) // 2 + 1], order[len(order) // 2 + 1 :]
    moved = [clients[0], *(Shard(rest.features[half], rest.labels[half]) for half in halves if len(half))]
    settings = {"d_primary": 20, "d_refinement": 15}
    for name, more in (
        ("apfl_paper", {}),
        ("apfl", {"map": "random", "scope": "client"}),
    ):  # of own tables only the client's own rows know
        before = last_round(name, clients, 3, **settings, **more).models[0]
        after = last_round(name, moved, 3, **settings, **more).models[0]
        torch.testing.assert_close(after.primary, before.primary, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(after.refinement, before.refinement, rtol=1e-9, atol=1e-9)
        assert after.balance == before.balance


def test_primary_stream_is_central_ridge_and_all_there_is_at_balance_zero():
    clients = draw_clients([5, 1, 30, 12], 6, 3, 0)
    central = last_round("central", clients, 3, d=25).models[0]
    alone = last_round("apfl_paper", clients, 3, d_primary=25, balance=0).models[2]
    assert torch.equal(alone.primary, central.primary)
    torch.testing.assert_close(alone.scores(clients[2].features), central.scores(clients[2].features))


def test_a_single_client_alone_is_local_ridge_and_central():
    clients = draw_clients([20], 6, 3, 0)
    local = last_round("local_ridge", clients, 3, d=25).models[0]
    central = last_round("central", clients, 3, d=25).models[0]
    torch.testing.assert_close(local.primary, central.primary, rtol=1e-9, atol=1e-9)


def test_going_alone_has_the_ridge_whose_left_out_rows_are_best():
    """Against leaving each row out and fitting anew, with more rows than columns and with fewer."""
    for n, d in ((14, 5), (6, 9)):
        phi, (shard,) = (
            torch.randn(n, d, generator=torch.Generator().manual_seed(n)).double(),
            draw_clients([n], 6, 3, n),
        )
        targets, ridges = one_hot(shard.labels, 3), (0.01, 0.3, 10.0)
        errors = []
        for ridge in ridges:
            left_out = 0.0
            for i in range(n):
                rest = [j for j in range(n) if j != i]
                system = phi[rest].T @ phi[rest] + ridge * torch.eye(d).double()
                fitted = phi[i] @ torch.linalg.solve(system, phi[rest].T @ targets[rest])
                left_out += float((fitted - targets[i]).square().sum())
            errors.append(left_out)
        for ridge, expected in zip(ridges, errors, strict=True):
            assert left_out_ridge(phi, targets, [ridge])[0] == pytest.approx(expected, rel=1e-9)
        assert left_out_ridge(phi, targets, ridges)[1] == ridges[errors.index(min(errors))]


def test_going_alone_by_left_out_rows_is_one_of_the_settings_that_it_may_have():
    (shard,) = draw_clients([40], 6, 3, 0)
    auto = last_round("local_ridge", [shard], 3, d=20, gamma="auto", normalise="auto")
    gamma, how = auto.chosen["median_gamma"], auto.models[0].normaliser.how
    fixed = last_round("local_ridge", [shard], 3, d=20, gamma=gamma, normalise=how)
    assert torch.equal(auto.models[0].scores(shard.features), fixed.models[0].scores(shard.features))
    targets, errors = one_hot(shard.labels, 3), {}
    for other in ("row", "root", "columns"):
        model = last_round("local_ridge", [shard], 3, d=20, normalise=other).models[0]
        errors[other] = left_out_ridge(model.primary_map(model.normaliser(shard.features)), targets)
    assert (min(errors, key=lambda name: errors[name]), gamma) == (how, errors[how][1])


def test_afl_equals_its_published_aggregation_law():
    """He et al., CVPR 2025: fold (C_k, W_k) pairwise by the absolute aggregation law, then remove all K gamma."""
    clients, gamma = draw_clients([40, 25, 60], 6, 3, 1), 1.0
    eye = torch.eye(6, dtype=torch.float64)
    folded: tuple[torch.Tensor, torch.Tensor] | None = None
    for shard in clients:
        z = shard.features * (6**0.5 / shard.features.norm(dim=1, keepdim=True))
        own_c = z.T @ z + gamma * eye
        own_w = torch.linalg.inv(own_c) @ z.T @ one_hot(shard.labels, 3)
        if folded is None:
            folded = own_c, own_w
            continue
        c, w = folded
        # W_u = I - C_u^-1 C_v (I - (C_u + C_v)^-1 C_v), and the same with u and v exchanged.
        weight = eye - torch.linalg.inv(c) @ own_c @ (eye - torch.linalg.inv(c + own_c) @ own_c)
        own_weight = eye - torch.linalg.inv(own_c) @ c @ (eye - torch.linalg.inv(c + own_c) @ c)
        folded = c + own_c, weight @ w + own_weight @ own_w
    c, w = folded
    law = torch.linalg.inv(c - len(clients) * gamma * eye) @ c @ w
    result = last_round("afl", clients, 3)
    assert result.chosen["ridge"] == 0
    torch.testing.assert_close(result.models[0].primary, law, rtol=1e-9, atol=1e-9)


def test_afl_adds_the_smallest_ridge_where_the_law_has_no_answer():
    clients = draw_clients([2, 3], 9, 3, 0)  # five rows, nine features
    result = last_round("afl", clients, 3)
    assert 0 < result.chosen["ridge"] < 1e-6
    assert all(bool(torch.isfinite(model.primary).all()) for model in result.models)
    whole = statistics(torch.eye(4, dtype=torch.float64), torch.eye(4, dtype=torch.float64))
    assert smallest_ridge(whole)[0] == 0


# Width of the statistics of six features, and bytes of what comes back, of three classes.
SHARED = {
    "afl": ({}, 6, 8 * 6 * 3),
    "fed3r": ({}, 7, 8 * 7 * 3),
    "fedlda": ({}, 6, 8 * 7 * 3),
    "oll": ({"d": 20}, 20, 8 * 20 * 3),
    "ridge_to_global": ({"d": 20}, 20, 8 * 20 * 3),
    "apfl_paper": ({"d_primary": 20, "d_refinement": 8}, 20, 8 * 20 * 3),
}


@pytest.mark.parametrize("normalise", ["row", "standardise", "none"])
@pytest.mark.parametrize("name", SHARED)
def test_bytes_are_those_of_the_messages(name, normalise):
    """Each client in the form that suits its rows: the factor of the few, the triangle of the many."""
    settings, d, down = SHARED[name]
    sizes = [5, 25, 20, 19]
    result = last_round(name, draw_clients(sizes, 6, 3, 0), 3, **settings, normalise=normalise)
    up = 0
    for n in sizes:
        phi, y = torch.ones(n, d), one_hot(torch.zeros(n, dtype=torch.long), 3)
        up += nbytes(factor_message(phi, y) if n < d else message(statistics(phi, y)))
    moments = normalise == "standardise"
    assert result.bytes_up == up + 4 * moments * 8 * (1 + 6 + 6 + 3)  # n, sums, squares, sizes of rows
    assert result.bytes_down == 4 * (down + moments * 8 * (6 + 6))  # mean, std
    assert result.index == 1 + moments


@pytest.mark.parametrize(("normalise", "width"), [("row", 6), ("columns", 7)])
def test_class_means_weigh_the_same_for_every_client(normalise, width):
    result = last_round("fedncm", draw_clients([5, 9], 6, 3, 0), 3, normalise=normalise)
    moments = normalise == "columns"
    assert result.bytes_up == 2 * 8 * (3 * (width + 1) + moments * 16)
    assert result.bytes_down == 2 * 8 * (3 * (width + 1) + moments * 12)


def test_clients_with_one_row_and_missing_classes_are_served():
    clients = [
        Shard(torch.randn(1, 5, generator=torch.Generator().manual_seed(k)), torch.tensor([k % 2])) for k in range(3)
    ]
    for name in ("apfl", "afl", "local_ridge", "central"):
        for model in last_round(name, clients, 4, **small(name)).models:
            assert bool(torch.isfinite(model.scores(clients[0].features)).all())


def test_settings_are_checked():
    assert load_method("apfl_paper", balance="0.3", d_primary="64").balance == 0.3
    for settings, message_ in [
        ({"balanse": 1}, "did you mean 'balance'"),
        ({"beta": 0}, r"^apfl.beta=0 given; allowed: a number greater than 0 or 'auto'$"),
        ({"d_primary": "wide"}, r"^apfl.d_primary='wide' given; allowed: a whole number or 'auto'$"),
        ({"intercept": "maybe"}, r"^apfl.intercept='maybe' given; allowed: true or false$"),
        ({"scope": "shrunk"}, r"^apfl: scope='shrunk' was removed"),
        ({"normalise": "rows"}, "'row'"),
    ]:
        with pytest.raises(InputError, match=message_):
            load_method("apfl", **settings)
    with pytest.raises(InputError, match="did you mean 'apfl'"):
        load_method("apfll")


@pytest.mark.parametrize("name", ["apfl_paper", "central", "local_ridge", "oll", "ridge_to_global"])
def test_no_map_is_wider_than_a_million(name):
    for width in (2**20 + 1, 0):
        with pytest.raises(InputError, match=r"d.*less than or equal to 1048576|d.*greater than 0"):
            load_method(name, **{"d_primary" if name == "apfl_paper" else "d": width})


def test_workers_keep_order_and_restore_threads():
    torch.set_num_threads(2)
    assert over_clients(lambda k: k * k, range(20), torch.device("cpu")) == [k * k for k in range(20)]
    with pytest.raises(ZeroDivisionError):
        over_clients(lambda k: 1 // k, range(3), torch.device("cpu"))
    assert torch.get_num_threads() == 2
    torch.set_num_threads(1)


@pytest.mark.gpu
@pytest.mark.parametrize("given", [{"map": "random", "d_primary": 50, "d_refinement": 60}, {"d_primary": 60}])
def test_cuda_gives_the_same_models(given):
    """With landmarks, too: in float64 no drawn landmark and no integer is near enough to a half to fall elsewhere."""
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device here")
    clients = draw_clients([40, 7, 90], 6, 3, 0)
    on_cpu, on_gpu = (
        last_round("apfl", [shard.to(device) for shard in clients], 3, **given).models for device in ("cpu", "cuda")
    )
    for cpu, gpu, shard in zip(on_cpu, on_gpu, clients, strict=True):
        there, here = gpu.scores(shard.features.cuda()).cpu(), cpu.scores(shard.features)
        torch.testing.assert_close(there, here, rtol=1e-9, atol=1e-9)


def test_solve_is_what_the_server_does():
    clients = draw_clients([5, 9], 6, 3, 0)
    model = last_round("apfl_paper", clients, 3, d_primary=20, gamma=2.0).models[0]
    z = torch.cat([model.primary_map(model.normaliser(s.features)) for s in clients])
    y = one_hot(torch.cat([s.labels for s in clients]), 3)
    torch.testing.assert_close(model.primary, solve(statistics(z, y), 2.0), rtol=1e-9, atol=1e-9)
