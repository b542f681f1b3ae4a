"""`apfl` with epsilon: what is released, what it may depend on, and what is refused."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest
import torch

import apfl
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Terms
from apfl.maths.hits import grid, left_out_prior
from apfl.maths.noise import SENSITIVITY, IntegerRows, moments
from apfl.maths.personalise import Rows, Shared, _unless_clear
from apfl.maths.privacy import epsilon_spent
from apfl.maths.ridge import Statistics, one_hot
from apfl.maths.wire import description_bytes
from apfl.methods import load_method, method_class
from apfl.methods._private import MOMENTS, WIDTH, Privacy, _noisy_sum
from apfl.methods._settings import settings_of

NEEDS = "needs the privacy extra: pip install 'apfl[privacy]'"
PRIVATE = {"map": "landmarks", "landmarks": "free", "bits": 24, "normalise": "root", "d_primary": 64}


def clients(n_rows: int = 60, n_clients: int = 5) -> list[Shard]:
    rng = torch.Generator().manual_seed(0)
    features = torch.rand(n_clients, n_rows, 12, generator=rng)
    labels = (features[..., 0] * 3).long()
    return [Shard(own, named) for own, named in zip(features, labels, strict=True)]


def released(epsilon: float = 4.0, **more):
    pytest.importorskip("dp_accounting", reason=NEEDS)
    return load_method("apfl", **PRIVATE | {"epsilon": epsilon} | more)


def last(method, shards):
    (*_, made) = method.rounds(shards, 3, 0)
    return made


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"map": "random", "bits": 0}, "epsilon with map='random' given"),
        ({"bits": 0}, "epsilon with bits=0 given.*Give bits=24 to 32"),
        ({"bits": 16}, "epsilon with bits=16 given"),
        ({"landmarks": "federation", "normalise": "columns"}, "epsilon with normalise='columns' and landmarks='fed"),
        ({"normalise": "auto"}, "epsilon with normalise='auto' and landmarks='free' given"),
        ({"normalise": "columns"}, "epsilon with normalise='columns' and landmarks='free' given"),
        ({"epsilon": 0}, "apfl.epsilon=0 given"),
        ({"delta": 1}, "apfl.delta=1 given"),
        ({"delta": 0}, "apfl.delta=0 given"),
        ({"colluders": -1}, "apfl.colluders=-1 given"),
    ],
)
def test_what_would_release_more_is_refused(changed, sentence):
    with pytest.raises(InputError, match=sentence):
        load_method("apfl", **PRIVATE | {"epsilon": 4.0} | changed)


def test_terms_without_noise_keep_their_digest():
    assert "epsilon" not in Terms("north").to_json()


def test_without_the_extra_a_run_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(InputError, match=r"pip install 'apfl\[privacy\]'"):
        last(load_method("apfl", **PRIVATE | {"epsilon": 4.4321}), clients())


def test_the_account_says_what_was_released():
    made = last(released(4.0, delta=1e-6), clients())
    assert made.chosen["epsilon_spent"] == pytest.approx(4.0, rel=1e-4)
    assert made.chosen["epsilon_spent"] <= 4.0
    assert made.chosen["delta"] == 1e-6
    assert made.chosen["noise_mechanism"] == "discrete Gaussian, once at the server"
    assert made.chosen["released"] == "Phi'Phi, Phi'Y and class counts, once"
    assert made.chosen["noise_sigma"] == pytest.approx(Privacy(4.0, 1e-6).sigma(), rel=1e-12)
    assert made.chosen["gamma"] == pytest.approx(made.chosen["noise_sigma"] * math.sqrt(64) * 3 / 4, rel=1e-12)
    assert last(released(4.0, gamma=7.0), clients()).chosen["gamma"] == 7.0


def test_less_epsilon_is_more_noise():
    sizes = [last(released(epsilon), clients()).chosen["noise_sigma"] for epsilon in (0.5, 1.0, 4.0, 8.0)]
    assert sizes == sorted(sizes, reverse=True)


@pytest.mark.parametrize(("noise", "more"), [("central", 1.0), ("shares", 5 / 3)])
def test_the_sum_has_the_noise_that_the_account_says(noise, more):
    """Two draws of it for the same rows, from the sums themselves; 4 of 5 shares suffice, less a colluder."""
    method = released(2.0, noise=noise, colluders=1)
    one, other = (method.streams(clients(), 3, seed) for seed in (0, 0))
    assert torch.equal(one.stats.class_counts, other.stats.class_counts)  # the same seed, whole numbers
    sigma = one.account["noise_sigma"]
    assert sigma == pytest.approx(Privacy(2.0, 1e-5).sigma() * math.sqrt(more), rel=1e-12)
    encoding = IntegerRows(one.stats.width, 3, 24)
    exact = sum(encoding.encode(_within(phi), s.labels)[0] for phi, s in zip(one.phis, clients(), strict=True))
    off = (one.stats.crosscorrelation - encoding.decode(exact).crosscorrelation).flatten()
    assert float(off.std()) == pytest.approx(sigma, rel=4 / math.sqrt(2 * len(off)))  # four standard errors


def _within(phi):
    return phi / phi.norm(dim=1, keepdim=True).clamp_min(1)


# ------------------------------------------------------------------ landmarks of moments with a share of the budget


@pytest.mark.parametrize("noise", ["central", "shares"])
def test_moments_and_statistics_together_spend_the_budget(noise):
    """By the law of Gaussian noise, too: inverse squares of noise multipliers add up."""
    method = released(2.0, landmarks="federation", noise=noise)
    account = method.streams(clients(), 3, 0).account
    more = 1.0 if noise == "central" else 5 / 4  # 4 of 5 shares suffice
    sigmas = [account[name] / math.sqrt(more) for name in ("noise_sigma_of_moments", "noise_sigma")]
    assert account["epsilon_spent"] == pytest.approx(2.0, rel=1e-4)
    assert account["epsilon_spent"] <= 2.0
    assert epsilon_spent(sigmas[0] / SENSITIVITY, 1e-5) < 2.0
    assert epsilon_spent(sigmas[1] / SENSITIVITY, 1e-5) < 2.0
    assert sum(each**-2 for each in sigmas) == pytest.approx(Privacy(2.0, 1e-5).sigma() ** -2, rel=1e-9)
    assert account["released"].startswith("moments of the normalised rows, once; Phi'Phi")


def test_the_moments_have_the_noise_that_the_account_says():
    """Of 300 draws of the noise of the same rows' moments."""
    pytest.importorskip("dp_accounting", reason=NEEDS)
    asked, rows = Privacy(2.0, 1e-5), [torch.nn.functional.normalize(own.features.double()) for own in clients()]
    encoding, none = IntegerRows(12, 1, 24), [torch.zeros(len(own), dtype=torch.int64) for own in rows]
    exact = sum(encoding.encode(own, of)[0] for own, of in zip(rows, none, strict=True))
    drawn = [_noisy_sum(encoding, rows, none, asked, MOMENTS, "noise of moments", seed) for seed in range(300)]
    off = torch.stack([each.vector for each in drawn]) - exact
    for name, size in encoding.sizes(asked.sigma(MOMENTS)).items():
        part = off[:, encoding.layout.places[name]].double()
        if part.shape[1] > 1:  # of a single count 300 draws tell 4 % of the size
            assert float(part.square().mean()) == pytest.approx(size**2, rel=0.05)
    assert asked.sigma(MOMENTS) == pytest.approx(asked.sigma() / math.sqrt(MOMENTS))


def test_no_two_sums_have_the_same_noise():
    """Whoever knew one could take it out of the other."""
    pytest.importorskip("dp_accounting", reason=NEEDS)
    encoding, asked = IntegerRows(12, 1, 24), Privacy(2.0, 1e-5)
    rows, none = [torch.zeros(1, 12, dtype=torch.float64)], [torch.zeros(1, dtype=torch.int64)]
    one, other = (_noisy_sum(encoding, rows, none, asked, 0.5, purpose, 0).vector for purpose in ("a", "b"))
    assert float((one == other).double().mean()) < 0.1


def test_one_row_more_changes_the_moments_by_no_more_than_the_bound():
    """Each entry over the size of its noise, for the longest rows that there are."""
    encoding, rng = IntegerRows(12, 1, 24), torch.Generator().manual_seed(0)
    rows = torch.randn(200, 12, generator=rng, dtype=torch.float64) ** 3
    rows = torch.cat([rows / rows.norm(dim=1, keepdim=True), torch.eye(12, dtype=torch.float64)])
    sizes = encoding.sizes(1.0)
    for row in rows:
        vector = encoding.encode(row[None], torch.zeros(1, dtype=torch.int64))[0].double()
        parts = [vector[where] / sizes[name] for name, where in encoding.layout.places.items()]
        assert float(torch.cat(parts).norm()) <= SENSITIVITY + 1e-12


def test_landmarks_of_noisy_moments_follow_the_rows_only_through_the_noise():
    """With much epsilon they are those of the moments without noise; the map of other rows is another."""
    shards = clients(n_rows=400)
    drawn = [released(e, landmarks="federation").streams(shards, 3, 0).primary_map.landmarks for e in (90.0, 0.2)]
    exact = load_method("apfl", **PRIVATE | {"landmarks": "federation", "bits": 16}).streams(shards, 3, 0).primary_map
    apart = [float((each.landmarks - exact.landmarks).norm(dim=1).mean()) for each in drawn]
    assert apart[0] < 0.2  # rows are rounded, and few
    assert apart[1] > 2 * apart[0]


def test_noise_is_taken_out_of_the_moments_again():
    """Three directions of rows stand out of the noise: the covariance is nearer to the true one than the noisy sum."""
    rng, n, width, sigma = torch.Generator().manual_seed(1), 20_000, 100, 40.0
    rows = torch.randn(n, width, generator=rng, dtype=torch.float64) * 0.2
    rows[:, :3] += torch.randn(n, 3, generator=rng, dtype=torch.float64) * torch.tensor([4.0, 3.0, 2.0])
    rows = torch.nn.functional.normalize(rows + 0.5)
    noise = torch.randn(width, width, generator=rng, dtype=torch.float64) * sigma
    noisy = rows.T @ rows + noise.tril() + noise.tril(-1).T
    mean = rows.sum(0) + sigma * torch.randn(width, generator=rng, dtype=torch.float64)
    told = moments(Statistics(noisy, mean[:, None], torch.tensor([float(n)]), n, float(n)), sigma)
    true = rows.T @ rows / n
    assert float((told.products - true).norm()) < 0.4 * float((noisy / n - true).norm())
    assert float(told.products.trace()) == pytest.approx(1.0, rel=1e-6)  # rows of length one
    assert float(torch.linalg.eigvalsh(told.products - torch.outer(told.sums, told.sums)).min()) >= -1e-12
    assert torch.equal(told.sums, mean / n)
    exact = moments(Statistics(rows.T @ rows, rows.sum(0)[:, None], torch.tensor([float(n)]), n, float(n)), 0.0)
    torch.testing.assert_close(exact.products, true, rtol=0, atol=1e-9)


def test_between_machines_moments_are_not_released():
    with pytest.raises(InputError, match="landmarks='federation' given: between machines no moments"):
        Terms(
            "f", method=load_method("apfl", **PRIVATE | {"epsilon": 4.0, "landmarks": "federation"}),
            class_names=("a", "b"), n_features=12, max_rows=60,
        )  # fmt: skip


def test_too_many_colluders_are_refused():
    with pytest.raises(InputError, match="colluders=4 of 5 clients given: a sum is opened with 4"):
        last(released(2.0, noise="shares", colluders=4), clients())


def test_nothing_but_the_noisy_sum_depends_on_a_row():
    """Map, scaling, width and gamma are those of the federation without the row; the sum differs by it alone."""
    all_rows = clients()
    method = released(2.0)
    fewer = [Shard(all_rows[0].features[1:], all_rows[0].labels[1:]), *all_rows[1:]]
    one, other = method.streams(all_rows, 3, 0), method.streams(fewer, 3, 0)
    assert one.primary_map.landmarks.fingerprint == other.primary_map.landmarks.fingerprint
    assert one.gamma == other.gamma
    assert one.normalise.how == other.normalise.how
    change = one.stats.crosscorrelation - other.stats.crosscorrelation  # of one noise
    assert 0 < float(change.norm()) <= 1 + 1e-9
    assert int((one.stats.class_counts - other.stats.class_counts).abs().sum()) == 1
    assert one.stats.n_copies == 0
    assert one.stats.echo is None


def test_the_width_does_not_follow_the_rows():
    method = load_method("apfl", **PRIVATE | {"epsilon": 4.0, "d_primary": "auto"})
    assert method.widths(100, 12) == method.widths(10**6, 12) == (WIDTH, WIDTH)


def test_a_client_sends_its_vector_once_and_no_table():
    shards = clients()
    made = last(released(), shards)
    vector = IntegerRows(made.chosen["d_primary"], 3, 24).layout.n_bytes
    assert made.bytes_up == len(shards) * (vector + description_bytes(12, moments=False))
    assert made.index == 1
    assert "beta" not in made.chosen or len({*made.chosen.get("beta_per_client", [0])}) == 1


def test_models_score_as_the_two_streams_do_and_late_clients_choose_for_themselves(tmp_path):
    shards = clients()
    made = last(released(8.0), shards[:4])
    (late,) = made.admit(shards[4:])
    late.save(tmp_path / "late.safetensors")
    again = apfl.load_model(tmp_path / "late.safetensors")
    assert torch.allclose(again.scores(shards[4].features), late.scores(shards[4].features))
    right = float((late.predict(shards[4].features) == shards[4].labels).double().mean())
    assert right > 0.6  # of three classes; its own refinement has seen these rows


def test_much_epsilon_is_nearly_no_noise():
    """With little noise and as little ridge the primary is that of the sums without noise."""
    method = released(60.0, bits=32, gamma=1.0)
    made = method.streams(clients(2000), 3, 0)
    encoding = IntegerRows(made.stats.width, 3, 32)
    exact = sum(encoding.encode(_within(phi), s.labels)[0] for phi, s in zip(made.phis, clients(2000), strict=True))
    told = encoding.decode(exact)
    error = float((told.crosscorrelation - made.stats.crosscorrelation).norm() / told.crosscorrelation.norm())
    assert error < 0.02
    assert made.stats.n_samples == pytest.approx(10_000, abs=10)


def test_public_features_decide_the_scaling(tmp_path):
    rng = np.random.default_rng(0)
    public = tmp_path / "public.npz"
    np.savez(public, features=rng.random((100, 12), dtype=np.float32) + 3, labels=np.zeros(100, int))
    made = released(8.0, landmarks=str(public), normalise="columns").streams(clients(), 3, 0)
    assert float(made.normalise.mean.mean()) == pytest.approx(3.5, abs=0.1)  # that of the file; the clients' is 0.5
    assert made.account["landmarks"]["rows"] == 100


def test_a_run_and_its_report_show_the_account():
    pytest.importorskip("dp_accounting", reason=NEEDS)
    study = apfl.run("digits", "apfl", clients=5, seeds=1, settings={"apfl": PRIVATE | {"epsilon": 8.0}})
    chosen = study.records[0].chosen
    assert chosen["epsilon_spent"] <= 8.0 == study.records[0].settings["epsilon"]
    assert chosen["noise_sigma"] / 0.6 > SENSITIVITY
    assert study.records[0].accuracy_client_mean > 0.7


def test_help_says_what_the_settings_are():
    told = {each.name: each for each in settings_of(method_class("apfl"))}
    assert (told["epsilon"].default, told["epsilon"].allowed) == ("none", "a number > 0 or none")
    assert "one row" in told["epsilon"].meaning
    assert told["delta"].default == "1e-05"
    assert told["noise"].allowed == "central, shares"
    assert "shares" in told["colluders"].meaning


def test_noise_that_takes_more_rows_than_there_are_leaves_priors_finite():
    labels = torch.tensor([0, 1, 1])
    rows = Rows(torch.eye(3), torch.eye(3), labels)
    own, everyone = Shared(torch.zeros(3, 3).double(), torch.tensor([0.0, 1.0, 5.0]).double()).counts(rows)
    assert everyone.tolist() == [1, 2, 5]
    assert bool(torch.isfinite(left_out_prior(one_hot(labels, 3), own, everyone, None, 0.03)).all())


def test_a_client_leaves_the_usual_setting_only_if_its_rows_clearly_say_so():
    tried = grid(1.0, beta=None, balance=None, tau=None)
    usual = (tried.betas[3], 0.3, 0.01)
    table = torch.full(tried.shape, 700)
    table[tried.index(usual)] = 700
    table[0, -1, -1] = 712
    assert _unless_clear(table, tried, 800) == usual  # 100 misses: 11 rows more are chance
    table[:2, -3:, -3:] = 760
    beta, balance, tau = _unless_clear(table, tried, 800)
    assert (beta <= tried.betas[1], balance >= 1.0, tau >= 0.12) == (True, True, True)
    fixed = grid(1.0, beta=2.0, balance=0.3, tau=0.1)
    assert _unless_clear(torch.tensor([[[5]]]), fixed, 10) == (2.0, 0.3, 0.1)
