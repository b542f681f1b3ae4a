"""A site of any size: parts that add exactly, passes that are killed, and a site that takes part with them."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from apfl import load_model
from apfl.data.federation import Shard
from apfl.errors import InputError
from apfl.federate import Coordinator, Site, Terms
from apfl.federate.landmarks import load_landmarks
from apfl.federate.masked.inprocess import MaskedFederation
from apfl.federate.stats import parts, passes
from apfl.federate.stats.parts import Part, add_parts, read_part, sealed, stage_in
from apfl.federate.stats.passes import Pass, batch_rows
from apfl.federate.stats.site import StreamedSite
from apfl.federate.stats.stages import Described, stage_of
from apfl.maths.landmarks import spread
from apfl.maths.leaveout import echo, leaving
from apfl.maths.normalise import moments
from apfl.methods.apfl import APFL
from apfl.models.file import read
from tests.commands import here
from tests.federate.federation_toys import (
    FIXED,
    LANDMARKS,
    NAMES,
    contribute,
    describe,
    draw_shard,
    keep_the_primary,
    seen,
    tabulate,
)
from tests.federate.masked.toys import METHOD, masked_sites, masked_terms

N = 400
RANDOM = replace(FIXED, map="random", bits=0)
SERVERS = ExitStack()


@pytest.fixture(autouse=True)
def _closed_servers():
    with SERVERS:
        yield


def write_shards(folder: Path, rows: Shard, cuts: tuple[int, ...] = (60, 150, 151, 290)) -> list[Path]:
    """The rows in files of all kinds; one has a single row."""
    folder.mkdir(parents=True, exist_ok=True)
    x, words = rows.features.numpy(), np.array(NAMES)[rows.labels.numpy()]
    made = []
    for k, some in enumerate(itertools.pairwise([0, *cuts, len(x)])):
        own, labels = x[slice(*some)], words[slice(*some)]
        ending = ("npz", "parquet", "npy")[k % 3]
        path = folder / f"shard-{k}.{ending}"
        if ending == "npz":
            np.savez(path, features=own, labels=labels)
        elif ending == "npy":
            np.save(path, own)
            np.save(path.with_suffix(".labels.npy"), labels)
        else:
            pq.write_table(pa.table({**{f"f{i}": own[:, i] for i in range(own.shape[1])}, "label": labels}), path)
        made.append(path)
    return made


def whole(n: int = N) -> Shard:
    return draw_shard(n, 7, dtype=torch.float32)


def in_double(rows: Shard) -> Shard:
    return replace(rows, features=rows.features.double())


def federation(folder: Path, method: APFL = LANDMARKS, **more: object) -> SimpleNamespace:
    """A settled federation whose first site has the whole rows in memory; everyone has sent statistics."""
    sites = [Site(folder / "sites", "big", in_double(whole()), NAMES, rounding_seed=5)]
    sites += [Site(folder / "sites", f"small-{k}", draw_shard(60, 20 + k), NAMES) for k in range(2)]
    server = SERVERS.enter_context(Coordinator(folder / "server", Terms("f", method=method, **more)))
    agreement = contribute(server, sites)
    landmarks = server.landmarks() if server.draft.landmarked else None
    return SimpleNamespace(server=server, sites=sites, agreement=agreement, terms=server.terms, landmarks=landmarks)


def part_of(terms: Terms, landmarks: bytes | None, files: list[Path], out: Path, **more: object) -> Part:
    return Pass(stage_of(terms, landmarks), files, out, **more).run()


def agreed_files(folder: Path, made: SimpleNamespace) -> Path:
    """Settled terms with their landmarks beside them, as a site keeps them."""
    folder.mkdir(exist_ok=True)
    (folder / "agreed.json").write_bytes(made.agreement)
    if made.landmarks is not None:
        (folder / "landmarks.safetensors").write_bytes(made.landmarks)
    return folder / "agreed.json"


# ------------------------------------------------------------------------------------------------- the sums


@pytest.mark.parametrize("method", [LANDMARKS, RANDOM], ids=["landmarks", "random"])
def test_statistics_are_those_of_one_pass_in_memory(tmp_path, method):
    made = federation(tmp_path, method)
    files = write_shards(tmp_path / "shards", whole())
    own = part_of(made.terms, made.landmarks, files, tmp_path / "p.safetensors").statistics()
    rows = in_double(whole())
    if made.landmarks is None:
        phi = made.terms.maps(rows.features)[0](made.terms.normaliser()(rows.features)).numpy()
    else:
        landmarks = load_landmarks(made.server.ledger, made.terms)
        assert landmarks is not None
        phi = landmarks.feature_map(made.terms.normaliser()(rows.features)).numpy()
    targets = np.eye(3)[rows.labels.numpy()]
    np.testing.assert_allclose(own.autocorrelation, phi.T @ phi, rtol=0, atol=1e-12 * np.abs(phi.T @ phi).max())
    np.testing.assert_allclose(own.crosscorrelation, phi.T @ targets, rtol=0, atol=1e-12 * np.abs(phi.T @ phi).max())
    assert own.class_counts.tolist() == targets.sum(0).tolist()
    assert own.n_samples == N
    assert torch.equal(own.echo, echo(whole().features))
    assert own.n_copies == 0


def test_description_and_moments_are_those_of_one_pass_in_memory(tmp_path):
    draft = Terms("f", method=LANDMARKS)
    files, rows = write_shards(tmp_path / "shards", whole()), in_double(whole()).features
    part = part_of(draft, None, files, tmp_path / "d.safetensors")
    told, expected = part.described.moments(part.n_samples), moments(rows)
    assert told is not None
    for name in ("sums", "squares", "sizes"):
        torch.testing.assert_close(vars(told)[name], vars(expected)[name], rtol=1e-12, atol=1e-12)
    counts = np.bincount(whole().labels.numpy())
    assert part.contributed == dict(zip(NAMES, counts.tolist(), strict=True))

    made = federation(tmp_path)
    outline = Terms.from_json(made.server.outline())
    own = part_of(outline, None, files, tmp_path / "m.safetensors").spread()
    same = spread(outline.normaliser()(rows), full=True)
    assert own.n_samples == N
    torch.testing.assert_close(own.products, same.products, rtol=0, atol=1e-12 * float(same.products.max()))
    torch.testing.assert_close(own.sums, same.sums, rtol=0, atol=1e-12 * float(same.products.max()))


@pytest.mark.parametrize("phase", ["description", "moments", "statistics"])
def test_any_order_and_any_grouping_give_the_same_bytes(tmp_path, phase):
    made = federation(tmp_path)
    terms = {
        "description": Terms("f", method=LANDMARKS), "moments": Terms.from_json(made.server.outline()),
        "statistics": made.terms,
    }[phase]  # fmt: skip
    files = write_shards(tmp_path / "shards", whole())
    at_once = sealed(part_of(terms, made.landmarks, files, tmp_path / "all.safetensors"))
    assert (tmp_path / "all.safetensors").read_bytes() == at_once
    backwards = part_of(terms, made.landmarks, files[::-1], tmp_path / "back.safetensors")
    assert sealed(backwards) == at_once
    for k, path in enumerate(files):
        part_of(terms, made.landmarks, [path], tmp_path / f"{k}.safetensors")

    def one(k: int) -> tuple[str, Part]:
        path = tmp_path / f"{k}.safetensors"
        return str(k), read_part(path, stage_in(path))

    for order in ([0, 1, 2, 3, 4], [4, 2, 0, 3, 1], [3, 4, 1, 0, 2]):
        assert sealed(add_parts(one(k) for k in order)) == at_once
    left, right = add_parts(one(k) for k in (2, 0)), add_parts(one(k) for k in (3, 1, 4))
    assert sealed(add_parts([("right", right), ("left", left)])) == at_once


@given(values=st.lists(st.floats(allow_nan=False, allow_infinity=False, width=32), min_size=1, max_size=8))
@settings(max_examples=30, deadline=None)
def test_moments_of_features_of_any_size_add_exactly(values):
    """Fractions are the second route: no sum of squares is lost beside a larger one."""
    rows = [torch.tensor([[value]], dtype=torch.float64) for value in values]
    one, other = Described(1, True), Described(1, True)
    for row in rows:
        one.add([(row, torch.zeros(1))])
    for row in rows[::-1]:
        single = Described(1, True)
        single.add([(row, torch.zeros(1))])
        other.merge(single)
    assert one.sums == other.sums
    loaded = Described(1, True)
    loaded.load(one.tensors())
    told = loaded.moments(len(rows))
    assert told is not None
    assert float(told.sums[0]) == float(sum(map(_fraction, values)))
    assert float(told.squares[0]) == float(sum(_fraction(value * value) for value in values))


def _fraction(x: float) -> object:
    from fractions import Fraction

    return Fraction(x)


def test_blocks_and_batches_change_nothing_that_counts(tmp_path, monkeypatch):
    """Small batches and blocks: sums are the same to rounding, rows and classes to the last one."""
    made = federation(tmp_path)
    files = write_shards(tmp_path / "shards", whole())
    large = part_of(made.terms, made.landmarks, files, tmp_path / "a.safetensors").statistics()
    monkeypatch.setattr(passes, "FEWEST", 8)
    monkeypatch.setattr(passes, "ENTRIES", 1024)
    monkeypatch.setattr(passes, "BLOCK", 32)
    assert batch_rows(made.terms.width, 8) == 8
    small = part_of(made.terms, made.landmarks, files, tmp_path / "b.safetensors").statistics()
    scale = float(large.autocorrelation.max())
    torch.testing.assert_close(small.autocorrelation, large.autocorrelation, rtol=0, atol=1e-12 * scale)
    assert torch.equal(small.class_counts, large.class_counts)
    assert torch.equal(small.echo, large.echo)


def test_copies_are_counted_as_in_memory_and_show_in_the_echo_across_shards(tmp_path):
    made = federation(tmp_path)
    rows = whole(100)
    rows = Shard(torch.cat([rows.features, rows.features[:9]]), torch.cat([rows.labels, rows.labels[:9]]))
    together = part_of(made.terms, made.landmarks, write_shards(tmp_path / "one", rows, ()), tmp_path / "a.safetensors")
    assert together.n_copies == int(leaving(rows.features, rows.labels, None).copies.sum()) == 9
    assert torch.equal(together.statistics().echo, echo(rows.features))
    apart = part_of(
        made.terms, made.landmarks, write_shards(tmp_path / "two", rows, (100,)), tmp_path / "b.safetensors"
    )
    assert apart.n_copies == 0
    assert int(apart.echo.sum()) == 109


def test_a_small_class_waits_aside_until_other_shards_bring_enough(tmp_path):
    made = federation(tmp_path, min_per_class=3)
    stage = stage_of(made.terms, made.landmarks)
    rows = draw_shard(60, 3, dtype=torch.float32)
    many = rows.where(rows.labels < 2)
    few = rows.where((rows.labels == 2).nonzero()[:4, 0])
    shards = [many + few.where(torch.tensor([0, 1])), few.where(torch.tensor([2])), few.where(torch.tensor([3]))]
    files = [write_shards(tmp_path / str(k), each, ())[0] for k, each in enumerate(shards)]

    def part(*which: int) -> Part:
        return Pass(stage, [files[k] for k in which], tmp_path / "p.safetensors").run()

    alone = part(0)
    assert alone.withheld == {"cat": 2}
    assert alone.statistics().class_counts[2] == 0
    assert alone.n_samples == len(many)
    assert part(1, 2).withheld == {"cat": 2}
    both = part(0, 1)
    assert both.withheld == {}
    all_three = [sealed(part(*order)) for order in itertools.permutations(range(3))]
    assert len(set(all_three)) == 1
    own = part(0, 1, 2).statistics()
    assert own.class_counts[2] == 4
    expected = stage.mapped(torch.cat([each.features for each in shards]).double())
    torch.testing.assert_close(own.autocorrelation, expected.T @ expected, rtol=0, atol=1e-10)
    assert int(own.echo.sum()) == len(many) + 4


# ------------------------------------------------------------------------------------------------- the files


def test_a_shard_counts_once(tmp_path):
    made = federation(tmp_path)
    files = write_shards(tmp_path / "shards", whole())
    again = tmp_path / "again.npz"
    again.write_bytes(files[0].read_bytes())
    with pytest.raises(InputError, match=r"again\.npz cannot be added to the other files: 1 of the shards are in both"):
        part_of(made.terms, made.landmarks, [*files, again], tmp_path / "p.safetensors")
    with pytest.raises(InputError, match="given twice"):
        part_of(made.terms, made.landmarks, [files[0], files[0]], tmp_path / "p.safetensors")
    one = part_of(made.terms, made.landmarks, files[:2], tmp_path / "1.safetensors")
    other = part_of(made.terms, made.landmarks, files[1:], tmp_path / "2.safetensors")
    with pytest.raises(InputError, match=r"b cannot be added: 1 of the shards are in both"):
        add_parts([("a", one), ("b", other)])
    labels = dict(np.load(files[0]))
    np.savez(again, features=labels["features"], labels=labels["labels"][::-1])  # the same rows of other classes
    part_of(made.terms, made.landmarks, [*files, again], tmp_path / "p.safetensors")


@pytest.mark.parametrize("after", [0, 300])
def test_a_killed_pass_goes_on_to_the_same_bytes(tmp_path, after, capfd):
    made = federation(tmp_path)
    files, out = write_shards(tmp_path / "shards", whole()), tmp_path / "killed.safetensors"
    terms = agreed_files(tmp_path / "home", made)
    command = [sys.executable, "-m", "tests.federate.stopped_pass", terms, out, after, *files]
    killed = subprocess.run([str(each) for each in command], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    partial = tmp_path / "killed.safetensors.partial"
    assert partial.exists() == (after > 0)
    if after:  # the shards that were finished are not read again
        done = {Path(name).name for name in json.loads(_header(partial))["done"]}
        assert done == {path.name for path in files[:4]}
        assert partial.stat().st_mode & 0o077 == 0
    assert here("stats", *files, "--terms", terms, "--out", out) == 0
    assert "statistics of 400 rows of 5 shards" in capfd.readouterr().out
    assert sorted(path.name for path in tmp_path.glob("*killed*")) == ["killed.safetensors"]
    assert here("stats", *files[::-1], "--terms", terms, "--out", tmp_path / "quiet.safetensors") == 0
    assert out.read_bytes() == (tmp_path / "quiet.safetensors").read_bytes()
    assert out.stat().st_mode & 0o077 == 0


def _header(path: Path) -> str:
    from safetensors import safe_open

    with safe_open(path, "pt") as file:
        return str(file.metadata()["apfl"])


def test_an_interrupted_pass_keeps_what_is_done(tmp_path):
    made = federation(tmp_path)
    files, out = write_shards(tmp_path / "shards", whole()), tmp_path / "p.safetensors"

    def interrupt(done: int, total: int) -> None:
        if done > 100:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        part_of(made.terms, made.landmarks, files, out, show=interrupt)
    assert json.loads(_header(tmp_path / "p.safetensors.partial"))["n_shards"] == 1
    with pytest.raises(InputError, match="is not given now: give the same files"):
        part_of(made.terms, made.landmarks, files[1:], out)
    with pytest.raises(InputError, match="made with other options"):
        part_of(made.terms, made.landmarks, files, out, share=0.5)
    os.utime(files[0])
    with pytest.raises(InputError, match="has changed since"):
        part_of(made.terms, made.landmarks, files, out)


def test_parts_that_do_not_belong_together(tmp_path, capfd):
    made = federation(tmp_path)
    files = write_shards(tmp_path / "shards", whole())
    one, two = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    part_of(made.terms, made.landmarks, files[:1], one)
    part_of(Terms("f", method=LANDMARKS), None, files[1:2], two)
    assert here("stats", "add", one, two, "--out", tmp_path / "3.safetensors") == 2
    assert "is a part of the description; the statistics is needed" in capfd.readouterr().err
    part_of(replace(made.terms, quorum=3), made.landmarks, files[1:2], two)
    assert here("stats", "add", one, two, "--out", tmp_path / "3.safetensors") == 2
    assert "was made under other terms" in capfd.readouterr().err
    part_of(made.terms, made.landmarks, files[1:2], two, share=0.9)
    assert here("stats", "add", one, two, "--out", tmp_path / "3.safetensors") == 2
    assert "other options" in capfd.readouterr().err
    two.write_bytes(one.read_bytes()[:-5])
    assert here("stats", "add", one, two, "--out", tmp_path / "3.safetensors") == 2
    assert not (tmp_path / "3.safetensors").exists()
    np.savez(tmp_path / "wide.npz", features=np.ones((4, 3)), labels=[0, 1, 0, 1])
    with pytest.raises(InputError, match="features of width 3 given; the federation agreed on 8"):
        part_of(made.terms, made.landmarks, [tmp_path / "wide.npz"], one)
    with pytest.raises(InputError, match="above 0 and at most 1"):
        part_of(made.terms, made.landmarks, files, one, share=0.0)
    assert here("stats", files[0], "--terms", tmp_path / "none.json", "--out", one) == 2


def test_a_share_is_the_same_rows_each_time_and_about_so_many(tmp_path):
    made = federation(tmp_path)
    files = write_shards(tmp_path / "shards", whole())
    own = [part_of(made.terms, made.landmarks, files, tmp_path / f"{k}.safetensors", share=0.5) for k in range(2)]
    assert sealed(own[0]) == sealed(own[1])
    assert 150 < own[0].n_samples < 250  # 5 standard deviations: 10 each


# -------------------------------------------------------------------------------------------------- the site


def streamed(tmp_path: Path, made: SimpleNamespace, name: str = "big") -> StreamedSite:
    """A site with the parts of every pass, and the landmarks."""
    files, folder = write_shards(tmp_path / "shards", whole()), tmp_path / "parts"
    folder.mkdir()
    part_of(made.server.draft, None, files, folder / "description.safetensors")
    if made.landmarks is not None:
        part_of(Terms.from_json(made.server.outline()), None, files, folder / "moments.safetensors")
    part_of(made.terms, made.landmarks, files, folder / "site.safetensors")
    site = StreamedSite(tmp_path / "streamed", name, folder, rounding_seed=5)
    if made.landmarks is not None:
        site.keep_landmarks(made.agreement, made.landmarks)
    return site


def test_every_message_is_that_of_a_site_with_its_rows_in_memory(tmp_path):
    """Sums differ in their last digits, and integers of them do not: rounding is by the same seed."""
    made = federation(tmp_path)
    site, twin = streamed(tmp_path, made), made.sites[0]
    outline = made.server.outline()
    assert site.spread(outline) == twin.spread(outline)
    assert site.statistics(made.agreement) == twin.statistics(made.agreement)
    assert site.statistics(made.agreement) == site.statistics(made.agreement)
    ours, theirs = (each.what_leaves(made.agreement).lines() for each in (site, twin))
    assert ours == theirs
    server = SERVERS.enter_context(Coordinator(tmp_path / "again", Terms("f", method=LANDMARKS)))
    assert server.describe(site.describe(server.invitation()), "big").ok
    assert site.changes() == {}


def test_a_federation_with_a_site_of_any_size(tmp_path, monkeypatch):
    """Its model is that of the same site with its rows in memory, and it lets the others choose the settings."""
    keep_the_primary(monkeypatch)
    method = replace(LANDMARKS, tau=0.05)
    made = federation(tmp_path, method)
    site = streamed(tmp_path, made)
    site.statistics(made.agreement)
    made.server.publish()
    with pytest.raises(InputError, match="sends no table of left-out hits"):
        site.table(made.agreement, made.server.deliver("big"))
    choice = tabulate(made.server, made.sites[1:])
    published = made.server.deliver("big")
    paths = [each.refine(made.agreement, published, choice) for each in (site, made.sites[0])]
    ours, theirs = map(load_model, paths)
    rows = draw_shard(50, 99).features
    torch.testing.assert_close(ours.scores(rows), theirs.scores(rows), rtol=0, atol=1e-9)
    assert read(paths[0]).settings["fitted"] == "from sums, without left-out rows"
    assert site.publication(made.terms) == 1
    primary = theirs.feature_map(made.terms.normaliser()(rows)) @ torch.zeros(made.terms.width, 3).double()
    assert not torch.allclose(ours.scores(rows), primary)


def test_under_a_random_map_it_contributes_and_receives_the_primary(tmp_path):
    made = federation(tmp_path, RANDOM)
    site = streamed(tmp_path, made)
    server = SERVERS.enter_context(Coordinator(tmp_path / "again", Terms("f", method=RANDOM)))
    small = made.sites[1:]
    assert server.describe(site.describe(server.invitation()), "big").ok
    agreement = describe(server, small)
    assert agreement == made.agreement
    for each in (site, *small):
        receipt = server.accept(each.statistics(agreement), each.name)
        assert receipt.ok, receipt
    server.publish()
    path = site.refine(agreement, server.deliver("big"), server.choose())
    assert read(path).settings["fitted"] == "the primary alone"
    rows = draw_shard(50, 99)
    hits = (load_model(path).scores(rows.features).argmax(1) == rows.labels).float().mean()
    assert hits > 0.6


def test_what_is_missing_is_said_with_the_command_that_makes_it(tmp_path):
    made = federation(tmp_path)
    folder = tmp_path / "parts"
    folder.mkdir()
    site = StreamedSite(tmp_path / "streamed", "big", folder)
    site.keep_landmarks(made.agreement, made.landmarks)
    with pytest.raises(InputError, match=r"no statistics of big .*apfl stats SHARD\.\.\. --terms .*agreed\.json --out"):
        site.statistics(made.agreement)
    home = tmp_path / "streamed" / "f" / "big"
    files = write_shards(tmp_path / "shards", whole())
    assert here("stats", *files, "--terms", home / "agreed.json", "--out", folder / "site.safetensors") == 0
    assert made.server.accept(site.statistics(made.agreement), "big").outcome in ("duplicate", "refused", "accepted")


def test_more_rows_than_the_terms_allow_need_a_share(tmp_path):
    made = federation(tmp_path, max_rows=150)
    files, folder = write_shards(tmp_path / "shards", whole()), tmp_path / "parts"
    part_of(made.terms, made.landmarks, files, folder / "site.safetensors")
    site = StreamedSite(tmp_path / "streamed", "late", folder)
    site.keep_landmarks(made.agreement, made.landmarks)
    with pytest.raises(InputError, match=r"400 rows; .* at most 150\. .*--share 0\.356"):
        site.statistics(made.agreement)
    part_of(made.terms, made.landmarks, files, folder / "site.safetensors", share=0.3)
    assert made.server.accept(site.statistics(made.agreement), "late").ok


def test_under_masks_it_adds_the_same_integers(tmp_path):
    """The twin in memory says first under which terms the parts are to be made; a table of hits has none of its own."""
    pytest.importorskip("cryptography", reason="needs the flower extra: pip install 'apfl[flower]'")
    terms = masked_terms(replace(METHOD, **{"gamma": 1.0, "beta": 1.0, "balance": 0.5, "tau": 0.0}))
    sites = masked_sites(tmp_path / "memory")
    rows = draw_shard(70, 11, dtype=torch.float32)
    sites[1].train = in_double(rows)
    server = SERVERS.enter_context(Coordinator(tmp_path / "one", terms))
    MaskedFederation(server, sites).run()
    files, folder = write_shards(tmp_path / "shards", rows, (30,)), tmp_path / "parts"
    landmarks = server.landmarks()
    for k, agreed in enumerate((terms, Terms.from_json(server.outline()), server.terms)):
        part_of(agreed, landmarks, files, folder / f"{k}.safetensors")
    again = masked_sites(tmp_path / "streamed")
    again[1] = StreamedSite(tmp_path / "streamed" / "sites", "site-1", folder, rounding_seed=1)
    second = SERVERS.enter_context(Coordinator(tmp_path / "two", terms))
    MaskedFederation(second, again).run()
    assert second.terms == server.terms
    one, other = (seen(each.current(), each.terms) for each in (server, second))
    assert torch.equal(one.weights, other.weights)


def test_join_shows_what_leaves(tmp_path, capfd):
    made = federation(tmp_path)
    files = write_shards(tmp_path / "shards", whole())
    terms, part = agreed_files(tmp_path / "home", made), tmp_path / "site.safetensors"
    assert here("stats", *files, "--terms", terms, "--out", part) == 0
    arguments = ["--server", "127.0.0.1:9092", "--name", "big", "--terms", terms, "--show-what-leaves"]
    assert here("federate", "join", *arguments, "--statistics", part, "--folder", tmp_path / "s") == 0
    told = capfd.readouterr().err
    assert "the number of rows (400)" in told
    assert "memory: about" in told
    assert here("federate", "join", *arguments) == 2
    assert "--data, or the parts" in capfd.readouterr().err
    assert here("federate", "join", *arguments, "--statistics", part, "--test-column", "t") == 2
    assert "--test-column and --statistics given" in capfd.readouterr().err
    assert here("federate", "join", *arguments, "--statistics", tmp_path / "none") == 2
    assert "there is no file or folder" in capfd.readouterr().err


def test_parts_reads_only_parts(tmp_path):
    (tmp_path / "x.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is no part"):
        stage_in(tmp_path / "x.safetensors")
    assert parts.KIND == "part"
