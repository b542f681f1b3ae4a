"""A federation with noise at a trusted server: what is published, what it is charged, and what a kill leaves of it."""

from __future__ import annotations

import json
import math
import random
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
from rich.console import Console

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, status_of
from apfl.federate.blobs import FolderError
from apfl.federate.contribution import check, decode
from apfl.federate.inprocess import simulate
from apfl.federate.messages import open_publication, seal_metrics, seal_publication
from apfl.federate.private import account, publishing
from apfl.federate.private.agreement import encoding_of
from apfl.federate.status import summary
from apfl.maths.privacy import epsilon_of, noise_multiplier
from apfl.methods._private import _generator
from apfl.models.file import read
from apfl.report.status import status_view
from tests.federate.federation_toys import NAMES, draw_shard, keep_the_primary, seen
from tests.federate.private.toys import (
    FIXED,
    METHOD,
    begun,
    join,
    need_accounting,
    private_sites,
    private_terms,
    standardised,
)  # fmt: skip


@pytest.fixture(autouse=True)
def _accounting():
    need_accounting()


def noisy(server: Coordinator) -> np.ndarray:
    """The last noisy sum that was released."""
    last = account.releases(server.ledger)[-1]
    return server.ledger.blobs.tensors(last.blob, last.sha256)["integers"].numpy()


@pytest.mark.parametrize("method", [FIXED, METHOD])
def test_the_federation_is_the_simulation(tmp_path, monkeypatch, method):
    """With the simulation's noise the primary, and every model, are those of `apfl` in one process."""
    keep_the_primary(monkeypatch)
    monkeypatch.setattr(publishing, "Entropy", lambda: _generator(0, "noise", 0))
    sites = private_sites(tmp_path)
    done = simulate(sites, private_terms(method), tmp_path / "server")
    shards = [site.train for site in sites]
    (made,) = method.rounds(shards, 3, 0)
    for site, path, model in zip(sites, done.models, made.models, strict=True):
        assert path == site.model_path(private_terms(method))
        predicted = site.predict(server_terms(tmp_path), site.test.features)
        assert predicted == [NAMES[i] for i in model.predict(site.test.features).tolist()]
        told = read(path).settings["privacy"]
        assert told["epsilon"] == pytest.approx(made.chosen["epsilon_spent"], rel=1e-12)
        assert told["sigma"] == pytest.approx(made.chosen["noise_sigma"], rel=1e-12)
    with Coordinator(tmp_path / "server") as server:
        published = seen(server.current(), server.terms)
        streams = method.streams(shards, 3, 0)
        exact = method._solved(streams, shards)
        assert torch.equal(published.weights, exact.weights)
        assert published.class_counts.tolist() == exact.stats.class_counts.tolist()
        assert published.gamma == pytest.approx(made.chosen["gamma"], rel=1e-12)


def server_terms(folder) -> bytes:
    with Coordinator(folder / "server") as server:
        return server.settle()


def test_each_release_has_fresh_noise_of_the_agreed_size(tmp_path):
    """Joins and leaves, eight releases: what is published less the exact sum is noise, and no two are alike."""
    sites, drawn = private_sites(tmp_path, (30, 25, 20, *[20] * 4)), []
    with begun(tmp_path, sites[:3], replace(FIXED, d_primary=40), releases=8) as server:
        server.publish()
        for site in sites[3:]:
            drawn.append(noisy(server) - server.pool.running().vector)
            assert join(server, site).ok
            server.publish()
        for name in ("site-1", "site-2", "site-0"):
            drawn.append(noisy(server) - server.pool.running().vector)
            evidence = server.leave(name)
            assert (evidence.residual, evidence.remains) == (None, ())  # of the sums without noise; of no terms
        encoding, sigma = encoding_of(server.terms), server.terms.sigma
        made = account.releases(server.ledger)
        assert len(made) == 8
        assert server.status()["privacy"]["releases"] == 8
    unit = [standardised(each, encoding, sigma) for each in drawn]
    together = np.concatenate(unit)
    assert together.std() == pytest.approx(1, rel=0.05)  # of 6,600 entries: its standard error is 0.9 %
    assert abs(together.mean()) < 6 / math.sqrt(len(together))
    correlations = np.corrcoef(unit)[np.triu_indices(len(unit), 1)]
    assert np.abs(correlations).max() < 6 / math.sqrt(len(unit[0]))


def test_the_account_is_the_composition_of_all_releases(tmp_path):
    """By dp-accounting's own accountant, event by event, and by hand: concentrated differential privacy adds up."""
    import dp_accounting as dp

    sites = private_sites(tmp_path)
    with begun(tmp_path, sites[:2], releases=5) as server:
        server.publish()
        for site in sites[2:]:
            assert join(server, site).ok
            server.publish()
        server.leave("site-0")
        made = account.releases(server.ledger)
    accountant = dp.rdp.RdpAccountant()
    z = noise_multiplier(4.0, 1e-5, 5)
    for number, each in enumerate(made, 1):
        accountant.compose(dp.GaussianDpEvent(z))
        # Each takes the best of the orders that it tries, and these differ.
        assert each.epsilon == pytest.approx(accountant.get_epsilon(1e-5), rel=2e-3)
        assert each.epsilon == epsilon_of([z] * number, 1e-5)
        rho = number / (2 * z**2)
        assert each.epsilon <= rho + 2 * math.sqrt(rho * math.log(1e5))  # Bun and Steinke (2016), Proposition 1.3
    assert [each.epsilon for each in made] == sorted(each.epsilon for each in made)
    assert made[-1].epsilon < 4.0 < epsilon_of([z] * 6, 1e-5)


def test_members_that_were_there_before_have_their_former_sum(tmp_path):
    """A site comes and goes: the sum without it was released already, with the same noise, and costs nothing more."""
    sites = private_sites(tmp_path)
    with begun(tmp_path, sites[:3], releases=2) as server:
        first = seen(server.publish(), server.terms)
        before = noisy(server)
        assert join(server, sites[3]).ok
        server.publish()
        evidence = server.leave("site-3")
        assert evidence.publication == 3
        again = seen(server.current(), server.terms)
        assert torch.equal(again.weights, first.weights)
        assert again.members == first.members
        assert len(account.releases(server.ledger)) == 2
        # The noisy sum with the site that left is gone, its charge is not.
        kept = [each.blob for each in account.releases(server.ledger)]
        assert kept == ["release-1.safetensors", ""]
        names = {path.name for path in (tmp_path / "server" / "blobs").glob("release-*")}
        assert names == {"release-1.safetensors"}
        np.testing.assert_array_equal(
            server.ledger.blobs.tensors(kept[0], account.releases(server.ledger)[0].sha256)["integers"].numpy(), before
        )


def test_what_would_pass_the_budget_is_refused(tmp_path):
    sites = private_sites(tmp_path)
    with begun(tmp_path, sites[:3]) as server:
        server.publish()
        late = join(server, sites[3])
        assert late.outcome == "refused"
        assert "release 2 would make epsilon" in late.reason
        assert "over 1 releases" in late.reason
        assert "can still receive" in late.reason
        assert not server.ready()
        # It receives, and has a model.
        site, agreement = sites[3], server.settle()
        assert site.refine(agreement, server.deliver(site.name), server.choose()).is_file()
        # A site may leave; then nothing is left to publish with.
        evidence = server.leave("site-0")
        assert evidence.publication is None
        assert any("the account has no room" in line for line in evidence.lines())
        assert server.current() is None
        with pytest.raises(InputError, match="release 2 would make epsilon"):
            server.publish()
        assert len(account.releases(server.ledger)) == 1
        assert not list((tmp_path / "server" / "blobs").glob("release-*"))


def test_a_kill_between_the_charge_and_the_publication_changes_nothing(tmp_path, monkeypatch):
    sites = private_sites(tmp_path)
    with monkeypatch.context() as broken:
        broken.setattr("apfl.federate.publishing.seal_publication", lambda *_: 1 / 0)
        with begun(tmp_path, sites) as server, pytest.raises(ZeroDivisionError):
            server.publish()
    with Coordinator(tmp_path / "server") as server:
        assert server.current() is None
        drawn = noisy(server)
        assert server.ready()
        server.publish()
        np.testing.assert_array_equal(noisy(server), drawn)
        assert len(account.releases(server.ledger)) == 1


def test_a_kill_before_the_charge_leaves_no_noise_behind(tmp_path, monkeypatch):
    sites, drawn = private_sites(tmp_path), []
    keep = account.write

    def dies(ledger, made):
        (path,) = (tmp_path / "server" / "blobs").glob("release-*")
        drawn.append(path.read_bytes())
        raise ZeroDivisionError

    with monkeypatch.context() as broken:
        broken.setattr(account, "write", dies)
        with begun(tmp_path, sites) as server, pytest.raises(ZeroDivisionError):
            server.publish()
    assert account.write is keep
    with Coordinator(tmp_path / "server") as server:
        assert not account.releases(server.ledger)
        assert not list((tmp_path / "server" / "blobs").glob("release-*"))
        server.publish()
        (path,) = (tmp_path / "server" / "blobs").glob("release-*")
        assert path.read_bytes() != drawn[0]
        assert len(account.releases(server.ledger)) == 1


def test_a_publication_that_is_damaged_is_published_again_from_the_same_sum(tmp_path):
    with begun(tmp_path, private_sites(tmp_path)) as server:
        first = seen(server.publish(), server.terms)
    path = tmp_path / "server" / "blobs" / "publication-1.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with Coordinator(tmp_path / "server") as server:
        assert server.ready()
        again = seen(server.publish(), server.terms)
        assert torch.equal(again.weights, first.weights)
        assert (again.number, len(account.releases(server.ledger))) == (2, 1)


def test_nothing_but_noisy_sums_goes_down(tmp_path):
    """The only hashes that others see are of contributions with a secret in them."""
    one, other = (private_sites(tmp_path / each)[0] for each in "ab")
    with begun(tmp_path / "a", private_sites(tmp_path / "a")) as server:
        agreement = server.settle()
        other.keep_landmarks(agreement, server.landmarks())
        same_rows = other.statistics(agreement), one.statistics(agreement)
        contributions = [decode(each, server.terms) for each in same_rows]
        np.testing.assert_array_equal(contributions[0].integers, contributions[1].integers)
        assert contributions[0].sha256 != contributions[1].sha256
        assert all(len(each.nonce) >= 32 for each in contributions)
        assert other.statistics(agreement) == same_rows[0]  # asked twice, the same
        server.publish()
        assert server.influence() == {}
        assert not server.terms.wants_tables
        told = seal_metrics(server.terms, "site-0", 1, 0.5, 10)
        assert "under epsilon none is taken" in server.metrics(told, "site-0").reason
        one.refine(agreement, server.deliver("site-0"), server.choose())
        with pytest.raises(InputError, match="under epsilon none is reported"):
            one.metrics(agreement)


def test_status_result_and_page_show_the_account(tmp_path):
    simulate(private_sites(tmp_path), private_terms(FIXED, releases=2), tmp_path / "server")
    state = status_of(tmp_path / "server")
    assert state["privacy"]["epsilon"] == pytest.approx(epsilon_of([noise_multiplier(4.0, 1e-5, 2)], 1e-5))
    assert {key: state["privacy"][key] for key in ("delta", "allowed", "releases", "planned", "noise")} == {
        "delta": 1e-5, "allowed": 4.0, "releases": 1, "planned": 2, "noise": "central",
    }  # fmt: skip
    console = Console(width=200, record=True, file=StringIO())
    console.print(status_view(state))
    assert "of 4 spent with delta 1e-05, one row the unit; 1 of 2 releases, noise central" in console.export_text()
    assert summary(tmp_path / "server")["epsilon_spent"] == state["privacy"]["epsilon"]
    assert status_of_plain(tmp_path) is None


def status_of_plain(folder):
    with Coordinator(folder / "plain", replace(private_terms(), method=replace(FIXED, epsilon="none"))) as server:
        return server.status()["privacy"]


def test_an_account_beyond_the_terms_is_refused_by_sites(tmp_path):
    with begun(tmp_path, private_sites(tmp_path)) as server:
        publication = server.publish()
        told, terms = seen(publication, server.terms), server.terms

        def sealed(**changed):
            return seal_publication(
                terms, 1, told.weights, 1.0, 1.0, told.class_counts, None, [], {**told.account, **changed}
            )

        assert open_publication(sealed(), terms).account["releases"] == 1
        for changed in (
            {"epsilon": 4.01}, {"releases": 2}, {"releases": 0}, {"delta": 1e-4}, {"epsilon": 0}, {"epsilon": "4"},
            {"epsilon": True}, {"releases": 1.0}, {"epsilon": None},
        ):  # fmt: skip
            with pytest.raises(InputError, match="a publication"):
                open_publication(sealed(**changed), terms)
        with pytest.raises(InputError, match="without its account"):
            open_publication(seal_publication(terms, 1, told.weights, 1.0, 1.0, told.class_counts, None, []), terms)


def test_contributions_that_no_rows_have_are_refused(tmp_path):
    """Sums of integer rows are exact, so a changed one shows; the account has nothing to do with it."""
    with begun(tmp_path, private_sites(tmp_path)) as server:
        data = private_sites(tmp_path)[0].statistics(server.settle())
        terms = server.terms
        contribution = decode(data, terms)
        places, unit = encoding_of(terms).layout.places, encoding_of(terms).count_unit
        rng, accepted = np.random.default_rng(0), 0
        for _ in range(200):
            changed = contribution.integers.copy()
            at = rng.integers(len(changed))
            changed[at] += rng.choice([-1, 1]) * 4 ** encoding_of(terms).f * 40
            try:
                check(replace(contribution, integers=changed), terms)
                accepted += 1
            except InputError:
                continue
        assert accepted < 20  # a class sum of 40 rows more than there are, mostly
        for name, change, why in (
            ("class_counts", 1, "whole numbers"),
            ("class_counts", -1000 * unit, "whole numbers"),
            ("class_counts", 41 * unit, "1 to 70"),
            ("diagonal", -(2**23), "squares that sum to"),
        ):
            changed = contribution.integers.copy()
            changed[places[name].start] += change
            with pytest.raises(InputError, match=why):
                check(replace(contribution, integers=changed), terms)


def test_messages_that_are_damaged_cost_their_sender_only(tmp_path):
    with begun(tmp_path, private_sites(tmp_path)) as server:
        site = private_sites(tmp_path, (20,), start=4)[0]
        agreement = server.settle()
        site.keep_landmarks(agreement, server.landmarks())
        data, rng, outcomes = site.statistics(agreement), random.Random(1), []
        for _ in range(150):
            changed = bytearray(data)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            outcomes.append(server.accept(bytes(changed), site.name).outcome)
            if outcomes[-1] == "accepted":
                server.leave(site.name)
        assert set(outcomes) <= {"accepted", "refused"}
        assert outcomes.count("refused") > 100
        publication, opened = server.publish().data, 0
        for _ in range(150):
            changed = bytearray(publication)
            changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
            try:
                open_publication(bytes(changed), server.terms)
                opened += 1
            except InputError:
                continue
        assert 0 < opened < 150  # a weight that is another number is a weight


def test_an_account_that_was_changed_on_disk_is_refused():
    good = account.written([account.Release("k", 1.0, 2.0, 3.0, 4.0, ("m",), "b", "s")])
    assert account.parse(good)[0].key == "k"
    rng, accepted = random.Random(0), 0
    for _ in range(400):
        changed = list(good)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.choice('0123456789"[]{},:-eE. abk')
        try:
            accepted += bool(account.parse("".join(changed)))
        except FolderError:
            continue
    assert 0 < accepted < 150
    for bad in ("[", "{}", "[1]", "[{}]", good.replace("1.0", "NaN"), good.replace("1.0", "-1.0"), good + " ",
                json.dumps(json.loads(good) * 2, sort_keys=True)):  # fmt: skip
        with pytest.raises(FolderError, match="an account that cannot be read"):
            account.parse(bad)


def test_a_site_that_rejoins_is_a_new_release(tmp_path):
    sites = private_sites(tmp_path)
    with begun(tmp_path, sites, releases=2) as server:
        server.publish()
        agreement, digest = server.settle(), server.contribution_of("site-0")
        changed = Site(tmp_path / "sites", "site-0", draw_shard(33, 77), NAMES)
        given = changed.rejoin(agreement, digest)
        assert server.rejoin(given["statistics"], "site-0").ok
        server.publish()
        made = account.releases(server.ledger)
        assert [bool(each.blob) for each in made] == [False, True]
        again = Site(tmp_path / "sites", "site-0", draw_shard(34, 78), NAMES)
        receipt = server.rejoin(again.rejoin(agreement, server.contribution_of("site-0"))["statistics"], "site-0")
        assert receipt.outcome == "refused"
        assert "release 3 would make epsilon" in receipt.reason
        assert server.current() is not None
