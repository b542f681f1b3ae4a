"""Terms with epsilon: what they must state, and that nothing in them follows from anyone's rows."""

from __future__ import annotations

import json
import random
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats as distributions

from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.landmarks import draw, open_landmarks
from apfl.federate.private.agreement import multiplier_of, outlined, share_of, sigma_of
from apfl.federate.private.entropy import Entropy
from apfl.federate.wire import sha256
from apfl.maths import privacy
from apfl.maths.noise import SENSITIVITY, discrete_gaussian
from apfl.maths.privacy import noise_multiplier
from apfl.methods._private import WIDTH
from tests.federate.federation_toys import NAMES, describe, draw_shard
from tests.federate.private.toys import FIXED, METHOD, need_accounting, private_sites, private_terms
from tests.maths.test_noise import BY_CHANCE, p_of_chi_square


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"class_names": None}, "without class_names given: under noise these must not follow from anyone's rows"),
        ({"n_features": None, "max_rows": None}, "without n_features, max_rows given"),
        ({"method": replace(METHOD, noise="shares")}, "a share of the noise is too little for one site's sums"),
        ({"releases": 0}, "releases='0'"),
        ({"sigma": -1.0}, "sigma='-1.0'"),
    ],
)
def test_what_would_tell_more_is_refused(given, sentence):
    terms = json.loads(private_terms(METHOD).to_json())
    method = given.pop("method", METHOD)
    with pytest.raises(InputError, match=sentence):
        Terms.checked(terms | given | {"method": vars(method)})


def test_landmarks_are_of_public_features_or_of_none(tmp_path):
    need_accounting()
    public = tmp_path / "public.npz"
    rows = np.random.default_rng(0).normal(2, 1, (60, 8)).astype(np.float32)
    np.savez(public, features=rows, labels=np.zeros(60, int))
    drawn = {}
    for name, source in (("free", "free"), ("public", str(public))):
        with Coordinator(tmp_path / name, private_terms(replace(METHOD, landmarks=source))) as server:
            describe(server, private_sites(tmp_path / f"sites-{name}"))
            drawn[name] = server.landmarks()
            assert server.terms.public_rows == (60 if name == "public" else None)
    assert drawn["free"] != drawn["public"]
    with pytest.raises(InputError, match=r"terms with epsilon=4.0 and normalise='columns' given"):
        private_terms(replace(METHOD, landmarks=str(public), normalise="columns"))
    with pytest.raises(InputError, match=r"terms with epsilon=4.0 and landmarks='federation' given"):
        private_terms(replace(METHOD, landmarks="federation"))


def test_terms_say_what_the_noise_is_and_others_are_as_before():
    terms = private_terms(METHOD, releases=3)
    told = json.loads(terms.to_json())
    assert (told["releases"], told["min_per_class"]) == (3, 1)
    assert {key: told["method"][key] for key in ("epsilon", "delta", "noise", "colluders")} == {
        "epsilon": 4.0, "delta": 1e-5, "noise": "central", "colluders": 0,
    }  # fmt: skip
    assert Terms.from_json(terms.to_json()) == terms
    assert json.loads(private_terms(METHOD).to_json())["releases"] == 1  # stated although it is the default
    masked = private_terms(METHOD, masked=True)
    assert masked.method.noise == "shares"
    assert not terms.wants_tables
    plain = json.loads(Terms("f").to_json())
    assert not {"releases", "sigma"} & plain.keys()
    assert not {"epsilon", "delta", "noise", "colluders"} & plain["method"].keys()


def test_no_row_changes_what_is_agreed(tmp_path):
    """Whatever sites describe, terms and landmarks are the same bytes."""
    need_accounting()
    agreed = []
    for k, sizes in enumerate(((30, 70, 20), (7, 8, 9))):
        with Coordinator(tmp_path / str(k), private_terms(replace(METHOD, d_primary="auto"))) as server:
            describe(server, private_sites(tmp_path / f"sites-{k}", sizes))
            agreed.append((server.settle(), sha256(server.landmarks())))
    assert agreed[0] == agreed[1]
    terms = Terms.from_json(agreed[0][0])
    assert (terms.method.d_primary, terms.bits, terms.most_rows) == (WIDTH, 24, 70)


def test_the_noise_is_that_of_all_releases_together():
    need_accounting()
    terms = outlined(private_terms(METHOD, releases=4))
    assert sigma_of(terms) == pytest.approx(SENSITIVITY * noise_multiplier(4.0, 1e-5, 4), rel=1e-12)
    assert multiplier_of(terms) == pytest.approx(noise_multiplier(4.0, 1e-5, 4), rel=1e-12)
    shared = outlined(private_terms(replace(METHOD, colluders=2), masked=True, releases=4))
    assert share_of(shared, 7) ** 2 == pytest.approx(sigma_of(terms) ** 2 / 5, rel=1e-12)
    with pytest.raises(InputError, match="colluders=2 given, and a roster whose sums are opened with 2 sites"):
        share_of(shared, 2)
    for sigma in (None, 0.99 * sigma_of(terms)):
        with pytest.raises(InputError, match=r"terms with noise of size .* needs .*Nothing was sent"):
            sigma_of(replace(terms, sigma=sigma))


def test_without_the_extra_a_site_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    privacy.noise_multiplier.cache_clear()
    with pytest.raises(InputError, match=r"pip install 'apfl\[privacy\]'"):
        outlined(private_terms(METHOD))


def test_landmarks_that_are_damaged_are_refused():
    """Of many changed messages those are accepted that say the same; none raises anything else."""
    need_accounting()
    terms, data = draw(outlined(private_terms(METHOD)), [])
    centred = open_landmarks(data, terms).centred
    assert centred is not None
    rng, accepted = random.Random(0), 0
    for _ in range(300):
        changed = bytearray(data)
        for _ in range(rng.randint(1, 3)):
            changed[rng.randrange(len(changed))] = rng.randrange(256)
        claimed = replace(terms, landmarks_sha256=sha256(bytes(changed)))  # past the hash, which would refuse all
        try:
            found = open_landmarks(bytes(changed), claimed)
        except InputError:
            continue
        accepted += 1
        assert bool(torch.isfinite(found.centred.mean).all())
        assert found.centred.scale > 0
    assert 20 < accepted < 290  # a changed digit of the centre is another centre


def test_the_systems_entropy_gives_the_same_noise_as_a_generator():
    source = Entropy(np.random.default_rng(5).bytes)
    assert p_of_chi_square(discrete_gaussian(2.5, 200_000, source), 2.5) > BY_CHANCE
    wide = discrete_gaussian(3e5, 200_000, source)
    assert wide.var() == pytest.approx(9e10, rel=0.05)
    uniform = source.random(100_000)
    assert 0 <= uniform.min() <= uniform.max() < 1
    assert distributions.kstest(uniform, "uniform").pvalue > BY_CHANCE
    trials = source.geometric(0.3, 100_000)
    observed = np.bincount(trials, minlength=12)[1:12]
    expected = 100_000 * 0.3 * 0.7 ** np.arange(11)
    assert distributions.chisquare(*(np.append(each, 1e5 - each.sum()) for each in (observed, expected))).pvalue > 1e-3
    assert not (Entropy().random(4) == Entropy().random(4)).all()


def vector_of(folder, terms, data, rows: Shard):
    site = Site(folder, "site", rows, NAMES)
    site.keep_landmarks(terms.to_json().encode(), data)
    return site.own_vector(terms)


def test_one_row_more_brings_nothing_else_along(tmp_path):
    """A class that had one row, or none, and a site that is full: the change is that of the row alone."""
    need_accounting()
    terms, data = draw(outlined(private_terms(FIXED, max_rows=40)), [])
    rows = draw_shard(40, 3)
    labels = rows.labels.clone()
    labels[labels == 2] = 0
    labels[-1] = 2  # the only one of its class
    for keep in (slice(None, -1), slice(1, None)):
        more = vector_of(tmp_path / "a", terms, data, Shard(rows.features, labels))
        fewer = vector_of(tmp_path / "b", terms, data, Shard(rows.features[keep], labels[keep]))
        change = (more - fewer).numpy()
        encoding = open_landmarks(data, terms).encoding(terms)
        sizes = encoding.sizes(1.0)
        total = sum(float(((change[where] / sizes[name]) ** 2).sum()) for name, where in encoding.layout.places.items())
        assert 0 < total <= SENSITIVITY**2 * (1 + 1e-12)
        assert int(change[encoding.layout.places["class_counts"]].sum()) == encoding.count_unit
    with pytest.raises(InputError, match=r"more than 40\. Under epsilon a site contributes all its rows or none"):
        vector_of(tmp_path / "c", terms, data, draw_shard(41, 3))
