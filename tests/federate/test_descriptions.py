"""What one description can do to the others: it settles nothing alone, and a lie costs its site only."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms, contribution
from apfl.federate.messages import open_description, seal_description
from apfl.federate.status import status_of
from apfl.federate.terms import MOST_CLASSES, MOST_WEIGHTS, Description, settle
from apfl.federate.usable import usable
from apfl.maths.normalise import Moments
from tests.federate.federation_toys import AUTO, FIXED, NAMES, PILOT, contribute, draw_shard, make_sites

TERMS = Terms("f", method=FIXED)


def described(client: str, n: int = 30, n_features: int = 8, classes: tuple[str, ...] = NAMES) -> Description:
    return Description(client, n, n_features, classes)


def names(n: int) -> tuple[str, ...]:
    return tuple(f"c{i:05d}" for i in range(n))


def lied(site: Site, draft: Terms, n: int, sizes: list[float]) -> bytes:
    """A site's description with another number of rows and other sizes of rows; all else fits the number."""
    told = open_description(site.describe(draft.to_json().encode()), draft)
    assert told.moments is not None
    own, times = told.moments, n / told.n_samples
    moved = Moments(n, own.sums * times, own.squares * times, torch.tensor(sizes, dtype=torch.float64))
    return seal_description(replace(told, n_samples=n, moments=moved), draft)


# ---------------------------------------------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("n", "sizes"),
    [
        (30, [1.0, 1e200, 1e300]),  # a square that overflows ended every run
        (2**40, [0.5, 0.0, 0.0]),  # a number that was looked for among all numbers up to n took a day
        (2**40, [2.0**40 + 1, 0.0, 0.0]),
        (30, [-1.0, 0.0, 0.0]),
        (30, [math.nan, 0.0, 0.0]),
    ],
)
def test_sizes_that_no_rows_have_cost_their_site_only(n, sizes, tmp_path):
    mallory, *sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", Terms("f", method=replace(AUTO, map="random", normalise="auto"))) as server:
        began = time.monotonic()
        receipt = server.describe(lied(mallory, server.draft, n, sizes), mallory.name)
        assert receipt.outcome == "refused"
        assert "sizes that no" in receipt.reason
        assert time.monotonic() - began < 30
        contribute(server, sites)
        assert server.publish().members == tuple(site.name for site in sites)
        assert [row["client"] for row in server.status()["refusals"]] == [mallory.name]


@pytest.mark.parametrize("error", [OverflowError("x"), RuntimeError("x"), IndexError("x"), ZeroDivisionError("x")])
def test_a_check_that_stumbles_refuses_the_message_and_names_the_site(error, tmp_path, monkeypatch):
    """Also over numbers that nobody has thought of yet: the run goes on, and the ledger says who."""
    mallory, *sites = make_sites(tmp_path)

    def stumbles(*_: object) -> None:
        raise error

    with Coordinator(tmp_path / "server", TERMS) as server:
        with monkeypatch.context() as patched:
            patched.setattr("apfl.federate.intake.open_description", stumbles)
            receipt = server.describe(b"\x1b[2J", mallory.name)
        where = f"{Path(__file__).name}, line {stumbles.__code__.co_firstlineno + 1}"
        assert receipt.reason == f"it cannot be read ({type(error).__name__} in {where})"
        contribute(server, sites)
        assert server.publish().members == tuple(site.name for site in sites)


def test_a_server_without_memory_blames_nobody(tmp_path, monkeypatch):
    def no_memory(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr("apfl.federate.intake.open_description", no_memory)
    with Coordinator(tmp_path / "server", TERMS) as server:
        with pytest.raises(MemoryError):
            server.describe(b"", "a")
        assert server.status()["n_refusals"] == 0


# ---------------------------------------------------------------------------------------------------- classes


def test_one_site_does_not_bring_any_number_of_classes(tmp_path):
    """60,000 names were settled; an honest site then needed 28.8 GB to check its own statistics."""
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", TERMS) as server:
        liar = described("mallory", 2 * MOST_CLASSES + 2, classes=names(MOST_CLASSES + 1))
        receipt = server.describe(seal_description(liar, server.draft), "mallory")
        assert receipt.outcome == "refused"
        assert f"{MOST_CLASSES + 1} classes; allowed are {MOST_CLASSES}" in receipt.reason
        contribute(server, sites)
        assert server.terms.class_names == NAMES
        assert server.publish().members == tuple(site.name for site in sites)


def test_many_classes_of_several_sites_are_refused_with_the_site_that_has_most(tmp_path):
    half = [described("a", 20_000, classes=names(6000)), described("b", 20_000, classes=names(9000))]
    more = described("mallory", 40_000, classes=tuple(f"x{i}" for i in range(MOST_CLASSES)))
    assert len(settle(TERMS, half).class_names) == 9000
    with pytest.raises(InputError, match=f"19000 classes among them, {MOST_CLASSES} of them at mallory.*leave"):
        settle(TERMS, [*half, more])
    stated = replace(TERMS, class_names=names(MOST_CLASSES + 5))  # whoever runs the server may have as many
    assert settle(stated, [replace(each, class_names=names(3)) for each in half]).n_classes == MOST_CLASSES + 5


@pytest.mark.parametrize(("n_junk", "width"), [(MOST_CLASSES - 2, "auto"), (400, MOST_WEIGHTS // 400)])
def test_a_site_whose_classes_are_too_many_with_the_others_is_left_out(n_junk, width, tmp_path):
    """Its description is within bounds by itself; nothing could be settled until someone took the site out."""
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", replace(TERMS, method=replace(FIXED, d_primary=width))) as server:
        junk = described("mallory", 2 * MOST_CLASSES, classes=names(n_junk))
        assert server.describe(seal_description(junk, server.draft), "mallory").ok
        for site in sites:
            assert server.describe(site.describe(server.invitation()), site.name).ok
        with pytest.MonkeyPatch.context() as patched:  # a map so wide takes seconds to draw
            patched.setattr("apfl.federate.coordinator.settle", lambda draft, kept, how: settle(TERMS, kept))
            server.settle()
        assert server.terms.class_names == NAMES
        (refusal,) = server.status()["refusals"]
    assert refusal["client"] == "mallory"
    assert f"{n_junk} classes, with which the clients have more than" in refusal["reason"]


def test_whoever_has_most_classes_that_nobody_else_has_is_left_out():
    """Not whoever has most: two honest sites share theirs. Of liars who share theirs, those with most classes."""
    honest = [described(f"site-{i}", 20_000, classes=names(6000)) for i in range(2)]
    small = described("small", classes=("c00000", "x0"))
    junk = tuple(f"x{i}" for i in range(5000))
    kept, left_out = usable(TERMS, [*honest, small, described("mallory", 20_000, classes=junk)])
    assert (kept, [each.client for each, _ in left_out]) == ([*honest, small], ["mallory"])
    liars = [described(name, 20_000, classes=(*junk, *(f"y{i}" for i in range(2000)))) for name in ("a", "b")]
    kept, left_out = usable(TERMS, [liars[0], *honest, small, liars[1]])
    assert ({each.client for each, _ in left_out}, kept) == ({"a", "b"}, [*honest, small])


def test_stated_classes_leave_nobody_out_and_neither_do_as_many_as_are_allowed():
    stated = replace(TERMS, class_names=names(2 * MOST_CLASSES))
    some = [described("a", classes=names(MOST_CLASSES)), described("b", classes=names(2 * MOST_CLASSES))]
    assert usable(stated, some) == (some, [])
    just = [described("a", classes=names(MOST_CLASSES - 3)), described("b")]
    assert usable(TERMS, just) == (just, [])


def test_width_times_classes_is_bounded():
    # 100 classes and three more
    wide = replace(TERMS, method=replace(FIXED, d_primary=MOST_WEIGHTS // 100 + 1))
    with pytest.raises(InputError, match=r"138244334 weights; allowed are 134217728.*d_primary"):
        settle(wide, [described("a", 300, classes=names(100)), described("b")])


def test_statistics_of_few_rows_take_memory_for_their_own_classes_only(tmp_path, monkeypatch):
    """With all classes there were two matrices of classes x classes at every site."""
    sites = make_sites(tmp_path, (30, 70))
    largest, diag = [0], torch.diag

    def measured(vector):
        largest[0] = max(largest[0], len(vector))
        return diag(vector)

    monkeypatch.setattr(contribution.torch, "diag", measured)
    with Coordinator(tmp_path / "server", replace(TERMS, class_names=(*NAMES, *names(2000)))) as server:
        contribute(server, sites)
    assert largest[0] == len(NAMES)


def test_targets_of_a_class_without_rows_are_refused(tmp_path):
    site = make_sites(tmp_path)[0]
    with Coordinator(tmp_path / "server", replace(TERMS, class_names=(*NAMES, "dog"), quorum=1)) as server:
        server.describe(site.describe(server.invitation()), site.name)
        data = site.statistics(server.settle())
        changed = contribution.decode(data, server.terms)
        assert contribution._factor_fits(changed, server.terms)
        changed.tensors["turned_targets"][0, 3] = 1e-9
        assert not contribution._factor_fits(changed, server.terms)


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory: 28 GB")])
@pytest.mark.parametrize("where", ["factor_message", "_factor_fits"])
def test_statistics_that_do_not_fit_into_memory_are_a_sentence(where, error, tmp_path, monkeypatch):
    def fails(*_):
        raise error

    site = make_sites(tmp_path)[0]
    with Coordinator(tmp_path / "server", replace(TERMS, quorum=1)) as server:
        server.describe(site.describe(server.invitation()), site.name)
        agreement = server.settle()
        monkeypatch.setattr(contribution, where, fails)
        with pytest.raises(InputError, match=r"40 columns and 3 classes do not fit into this machine's memory.*larger"):
            site.statistics(agreement)


# ----------------------------------------------------------------------------------------------------- width


def of_width(folder: Path, name: str, n_features: int, seed: int = 5) -> Site:
    return Site(folder / "sites", name, draw_shard(30, seed, n_features), NAMES)


@pytest.mark.parametrize("turn", [0, 2, 4])
def test_the_width_is_that_of_most_clients_whoever_comes_first(turn, tmp_path):
    """The first used to decide: a liar of width 7 kept all others out."""
    sites, liar = make_sites(tmp_path), of_width(tmp_path, "mallory", 7)
    with Coordinator(tmp_path / "server", TERMS) as server:
        for site in [*sites[:turn], liar, *sites[turn:]]:
            assert server.describe(site.describe(server.invitation()), site.name).outcome == "accepted"
        agreement = server.settle()
        assert server.terms.n_features == 8
        for site in sites:
            assert server.accept(site.statistics(agreement), site.name).ok
        with pytest.raises(InputError, match="features of width 7 given; the federation agreed on 8"):
            liar.statistics(agreement)
        again = server.describe(liar.describe(server.invitation()), "mallory")
        assert again.outcome == "refused"
    told = status_of(tmp_path / "server")
    assert {row["client"] for row in told["refusals"]} == {"mallory"}
    assert "features of width 7; most clients have 8: use the same backbone" in [r["reason"] for r in told["refusals"]]


def test_the_odd_one_has_no_part_in_what_is_settled(tmp_path):
    sites = make_sites(tmp_path)
    agreements, tried = [], []
    for folder, some in (("with", [of_width(tmp_path, "mallory", 7), *sites]), ("without", sites)):
        for method in (AUTO, PILOT):
            home = tmp_path / folder / method.normalise
            with Coordinator(home, Terms("f", max_share=0.5, method=method)) as server:
                for site in some:
                    assert server.describe(site.describe(server.invitation()), site.name).ok
                if server.draft.pilots:
                    tried.append((server.trial(), server.pilot_question()))
                else:
                    agreements.append(server.settle())
    assert agreements[0] == agreements[1]
    assert tried[0] == tried[1]


def test_without_a_majority_the_widths_are_named_and_more_sites_decide(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", TERMS) as server:
        for site in (of_width(tmp_path, "mallory", 7), sites[0]):
            assert server.describe(site.describe(server.invitation()), site.name).ok
        with pytest.raises(InputError, match=r"7 at mallory; 8 at site-0.*same backbone\. Run again"):
            server.settle()
        assert not server.settled
        assert server.describe(sites[1].describe(server.invitation()), sites[1].name).ok
        server.settle()
        assert server.terms.n_features == 8


def test_the_majority_must_be_a_quorum(tmp_path):
    sites = make_sites(tmp_path)
    with Coordinator(tmp_path / "server", replace(TERMS, quorum=3)) as server:
        for site in (of_width(tmp_path, "mallory", 7), *sites[:2]):
            server.describe(site.describe(server.invitation()), site.name)
        with pytest.raises(InputError, match="2 clients have described themselves, with features of one width"):
            server.settle()
        assert "mallory" in server.ledger.answered("descriptions")  # nothing has changed


# ----------------------------------------------------------------------------------------------------- share


@pytest.mark.parametrize(("share", "k"), [(0.2, 5), (0.21, 5), (0.249, 5), (0.1, 5), (0.34, 3)])
def test_a_share_by_which_the_smallest_sets_everyones_cap_is_refused(share, k):
    """Four sites of 10,000 rows and one of 4 with a share of 0.2: 4 rows of each counted."""
    some = [described(f"site-{i}", 10_000) for i in range(k - 1)] + [described("mallory", 6)]
    with pytest.raises(InputError, match=f"max_share {share:g} given, and {k} clients.*Allowed is 0.*--max-share"):
        settle(replace(TERMS, max_share=share), some)
    assert settle(replace(TERMS, max_share=share, max_rows=500), some).max_rows == 500


@pytest.mark.parametrize("k", [3, 4, 5, 6, 11])
def test_at_the_smallest_share_allowed_a_tiny_site_takes_nothing_from_the_others(k):
    some = [described(f"site-{i}", 10_000) for i in range(k - 1)] + [described("mallory", 6)]
    assert settle(replace(TERMS, max_share=1 / (k - 1)), some).max_rows >= 10_000
