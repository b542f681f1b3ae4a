"""Noise in shares inside the masks: its size with dropouts and colluders, one release for a roster, two accounts."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest
import torch

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, status_of
from apfl.federate.inprocess import simulate
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.masked.purposes import Purpose, round_of
from apfl.federate.masked.server import Cohort
from apfl.federate.masked.site import MaskedSite
from apfl.federate.private import account
from apfl.federate.private.agreement import encoding_of, outlined, share_of
from apfl.federate.private.shares import noisy_layout, noisy_vector
from apfl.maths.privacy import epsilon_of, noise_multiplier
from apfl.models.file import read
from tests.federate.federation_toys import NAMES, draw_shard, seen
from tests.federate.private.toys import FIXED, METHOD, need_accounting, private_sites, private_terms, standardised

pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")

from apfl.federate.secure import enlist

# Noise is from the system's entropy here, and no seed repeats it: bounds are six standard errors or more.
SHARES = replace(FIXED, colluders=1)
FIVE = (40, 70, 60, 55, 50)


@pytest.fixture(autouse=True)
def _accounting():
    need_accounting()


def shares_terms(method=SHARES, **others):
    return private_terms(method, masked=True, **others)


def exact(server: Coordinator, sites) -> np.ndarray:
    return sum(site.own_vector(server.terms).numpy() for site in sites)


def test_any_t_shares_less_the_colluders_are_enough(tmp_path):
    """Seven sites, five of which open a sum: without the shares of a colluder every four have the agreed variance."""
    terms = outlined(shares_terms(replace(SHARES, d_primary=100)))
    roster = next(iter(enlist([f"site-{k}" for k in range(7)]).values())).roster
    assert roster.threshold == 5
    encoding = encoding_of(terms)
    nothing = torch.zeros(encoding.layout.size, dtype=torch.int64)
    shares = [noisy_vector(tmp_path / str(k), terms, roster, lambda: nothing)[0] for k in range(7)]
    for four in combinations(shares, 4):
        noise = standardised(sum(four), encoding, terms.sigma)
        assert noise.std() == pytest.approx(1, rel=0.06)  # of 5,400 entries: its standard error is 1 %
    assert standardised(sum(shares), encoding, terms.sigma).std() == pytest.approx(math.sqrt(7 / 4), rel=0.05)
    assert np.abs(np.corrcoef(shares)[np.triu_indices(7, 1)]).max() < 6 / math.sqrt(len(nothing))


def test_the_range_has_room_for_the_noise_of_a_small_epsilon(tmp_path):
    terms = outlined(shares_terms(replace(SHARES, epsilon=0.01, delta=1e-9)))
    roster = next(iter(enlist(["a", "b", "c"]).values())).roster
    layout, sizes = noisy_layout(terms, roster), encoding_of(terms).sizes(share_of(terms, roster.threshold))
    for part, own in zip(layout.parts, encoding_of(terms).layout.parts, strict=True):
        assert part.high >= own.high + 20 * sizes[part.name]
    nothing = torch.zeros(layout.size, dtype=torch.int64)
    vector, data = noisy_vector(tmp_path / "v", terms, roster, lambda: nothing)
    (tmp_path / "v").write_bytes(data)
    again, made = noisy_vector(tmp_path / "v", terms, roster, lambda: 1 / 0)
    np.testing.assert_array_equal(again, vector)
    assert made is None
    assert standardised(vector, encoding_of(terms), share_of(terms, 3)).std() == pytest.approx(1, rel=0.2)  # 375 draws


def test_a_masked_federation_publishes_a_noisy_sum(tmp_path):
    sites = private_sites(tmp_path, FIVE)
    done = simulate(sites, shares_terms(), tmp_path / "server")
    assert len(done.models) == 5
    with Coordinator(tmp_path / "server") as server:
        (release,) = account.releases(server.ledger)
        noise = server.pool.running().vector - exact(server, sites)
        unit = standardised(noise, encoding_of(server.terms), release.sigma)
        assert unit.std() == pytest.approx(1, rel=6 / math.sqrt(2 * len(unit)))
        assert release.sigma == pytest.approx(server.terms.sigma * math.sqrt(5 / 3), rel=1e-12)  # t = 4, a colluder
        assert release.multiplier == pytest.approx(noise_multiplier(4.0, 1e-5), rel=1e-9)
        published = seen(server.current(), server.terms)
        assert published.gamma == pytest.approx(release.sigma * math.sqrt(server.terms.width) * 3 / 4, rel=1e-12)
        assert published.account["epsilon"] == release.epsilon <= 4.0
        own = account.parse((sites[0].home(server.terms) / "account.json").read_text())
        assert [(each.key, each.epsilon) for each in own] == [(release.key, release.epsilon)]
    assert read(done.models[0]).settings["privacy"]["noise"] == "shares"
    assert status_of(tmp_path / "server")["privacy"]["releases"] == 1


@pytest.mark.parametrize("when", ["advertise", "share", "mask", "confirm", "unmask"])
def test_a_site_that_drops_out_leaves_enough_noise(tmp_path, when):
    sites = private_sites(tmp_path, FIVE)
    with Coordinator(tmp_path / "server", shares_terms()) as server:
        federation = MaskedFederation(server, sites)
        order = ("advertise", "share", "mask", "confirm", "unmask")
        federation.answers = lambda what, phase, name: name != "site-2" or order.index(phase) < order.index(when)
        federation.sum_up()
        server.publish()
        inside = [site for site in sites if site.name in server.pool.members()]
        assert len(inside) == (5 if when in ("confirm", "unmask") else 4)
        (release,) = account.releases(server.ledger)
        assert release.sigma == pytest.approx(server.terms.sigma * math.sqrt(len(inside) / 3), rel=1e-12)
        unit = standardised(
            server.pool.running().vector - exact(server, inside), encoding_of(server.terms), release.sigma
        )
        assert unit.std() == pytest.approx(1, rel=6 / math.sqrt(2 * len(unit)))


def test_a_server_that_is_killed_when_the_sum_is_open_gets_the_same_sum_for_one_charge(tmp_path, monkeypatch):
    sites, members = private_sites(tmp_path, FIVE), enlist([f"site-{k}" for k in range(5)], federation="f")
    sums = []
    keep = Cohort.take

    def dies(cohort, done):
        sums.append(done.digits.join(done.aggregator.total, 5))
        raise ZeroDivisionError

    with Coordinator(tmp_path / "server", shares_terms()) as server:
        monkeypatch.setattr(Cohort, "take", dies)
        with pytest.raises(ZeroDivisionError):
            MaskedFederation(server, sites, members).sum_up()
    monkeypatch.setattr(Cohort, "take", keep)
    # The rows of one site change, and that changes nothing: the roster's sum is what it was.
    sites[0] = Site(tmp_path / "sites", "site-0", draw_shard(33, 77), NAMES)
    with Coordinator(tmp_path / "server") as server:
        assert len(account.releases(server.ledger)) == 1  # charged before it was known
        MaskedFederation(server, sites, members).sum_up()
        np.testing.assert_array_equal(server.pool.running().vector, sums[0])
        assert len(account.releases(server.ledger)) == 1
        assert server.publish().number == 1


def test_a_sum_that_is_never_opened_costs_nothing(tmp_path):
    sites, members = private_sites(tmp_path, FIVE), enlist([f"site-{k}" for k in range(5)], federation="f")
    with Coordinator(tmp_path / "server", shares_terms()) as server:
        federation = MaskedFederation(server, sites, members)
        federation.answers = lambda what, phase, name: phase != "mask" or name in ("site-0", "site-1")
        with pytest.raises(InputError, match="nothing is unmasked"):
            federation.sum_up()
        assert not account.releases(server.ledger)
        assert not (sites[0].home(server.draft) / "account.json").exists()
        # So another roster can still have the one release that there is.
        MaskedFederation(server, sites[:4]).sum_up()
        assert len(account.releases(server.ledger)) == 1


def test_leaving_takes_a_fresh_release_of_the_others(tmp_path):
    sites = private_sites(tmp_path, FIVE)
    with Coordinator(tmp_path / "server", shares_terms(releases=2)) as server:
        MaskedFederation(server, sites).run()
        first = [site.noisy_vector(server.terms, roster_of(server)) for site in sites[1:]]
        evidence = server.leave("site-0")
        assert not any("not undone" in line for line in evidence.lines())
        others = MaskedFederation(server, sites[1:])
        others.run()
        for before, site in zip(first, sites[1:], strict=True):
            now = site.noisy_vector(server.terms, others.cohort.roster)
            assert np.mean(now == before) < 0.1
        made = account.releases(server.ledger)
        z = noise_multiplier(4.0, 1e-5, 2)
        assert [each.epsilon for each in made] == pytest.approx([epsilon_of([z] * k, 1e-5) for k in (1, 2)], rel=1e-9)
        assert seen(server.current(), server.terms).account["releases"] == 2
        # A third one is refused, by the server before it asks anyone ...
        server.leave("site-1")
        third = MaskedFederation(server, sites[2:])
        with pytest.raises(InputError, match="release 3 would make epsilon"):
            third.sum_up()
        # ... and by each site, if the server does not mind.
        third.cohort.enter = lambda *_: None
        with pytest.raises(InputError, match="release 3 would make epsilon"):
            third.sum_up()
        # A server that raises the budget is not answered either: these are not the terms of the first time.
        for changed in ({"method": replace(server.terms.method, epsilon=100.0)}, {"releases": 3}):
            other = replace(server.terms, **changed)
            with pytest.raises(InputError, match=f"{'releases' if 'releases' in changed else 'epsilon'} has changed"):
                sites[3].unchanged(other)


def roster_of(server: Coordinator):
    from apfl.federate.masked.tables import cohorts

    return next(iter(cohorts(server.ledger).values()))


def test_a_late_cohort_has_noise_and_a_charge_of_its_own(tmp_path):
    early, late = private_sites(tmp_path, (70, 60, 60, 50)), private_sites(tmp_path, (60, 60, 60), start=4)
    with Coordinator(tmp_path / "server", shares_terms(releases=2)) as server:
        MaskedFederation(server, early).run()
        MaskedFederation(server, late).sum_up()
        publication = server.publish()
        made = account.releases(server.ledger)
        assert [len(made), publication.number] == [2, 2]
        published = seen(publication, server.terms)
        both = math.sqrt(sum(each.sigma**2 for each in made))
        assert published.account["sigma"] == pytest.approx(both, rel=1e-12)
        assert published.gamma == pytest.approx(both * math.sqrt(server.terms.width) * 3 / 4, rel=1e-12)
        assert made[1].sigma == pytest.approx(server.terms.sigma * math.sqrt(3 / 2), rel=1e-12)  # 3 of 3, a colluder


def test_no_other_sum_leaves_a_site(tmp_path):
    (site, *_) = private_sites(tmp_path, FIVE)
    members = enlist(["site-0", "site-1", "site-2"], federation="f")
    with Coordinator(tmp_path / "server", shares_terms(METHOD)) as server:
        cohort = Cohort(server, members["site-0"].roster)
        assert cohort.owed() == Purpose("statistics")
        agreement = server.settle()
        site.keep_landmarks(agreement, server.landmarks())
        masked = MaskedSite(site, members["site-0"])
        for what in ("count", "table", "metrics"):
            round_, _ = round_of(Purpose(what), 1, cohort.roster, server.terms, None, None)
            with pytest.raises(InputError, match="statistics with noise are all that leaves this site"):
                masked.answer("advertise", round_.to_bytes(), agreement)
        round_, _ = round_of(Purpose("statistics"), 1, cohort.roster, server.terms, None, server.pool.landmarks)
        # Terms that state too little noise, or an account that cannot be read: nothing leaves.
        weak = replace(server.terms, sigma=server.terms.sigma / 2).to_json().encode()
        with pytest.raises(InputError, match="terms with noise of size"):
            masked.answer("advertise", round_.to_bytes(), weak)
        assert masked.answer("advertise", round_.to_bytes(), agreement)
        (site.home(server.terms) / "account.json").write_text("[")
        with pytest.raises(InputError, match="restore it, or this site sends nothing"):
            masked.answer("advertise", round_.to_bytes(), agreement)
        with pytest.raises(InputError, match="only sums over several sites may be known"):
            site.statistics(agreement)


def test_what_leaves_is_said_with_the_noise(tmp_path):
    (site, *_) = private_sites(tmp_path)
    with Coordinator(tmp_path / "server", shares_terms()) as server:
        Cohort(server, enlist(["site-0", "site-1", "site-2"], federation="f")["site-0"].roster).owed()
        told = "\n".join(site.what_leaves(server.settle()).lines())
        assert "share of the noise, of variance sigma^2 / (t - 1)" in told
        assert f"sigma {server.terms.sigma:.3g}" in told
    assert "also if 1 other sites tell the server their noise" in told
    for word in ("buckets", "settings tried", "metrics only if"):
        assert word not in told
    central = "\n".join(site.what_leaves(private_terms(releases=3).to_json().encode()).lines())
    assert "epsilon 4 with delta 1e-05 over at most 3 sums, each with fresh noise, against everyone but the" in central
    assert "30" in central
    assert json.loads(private_terms().to_json())["method"]["noise"] == "central"
