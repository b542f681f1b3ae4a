"""The cost model: its bytes are those that a federation sends, and its seconds and bytes grow as they should."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from apfl.errors import InputError
from apfl.experiments.cost import RUN, cost
from apfl.experiments.operations import Size
from apfl.experiments.rates import Rates, measured_rates
from apfl.federate import Site, Terms
from apfl.federate.inprocess import simulate
from apfl.maths.landmarks import SYNTHETIC
from apfl.maths.memory import LEAST_POINTS
from apfl.maths.wire import ECHO_BYTES
from apfl.methods.apfl import APFL
from tests.commands import here
from tests.federate.federation_toys import LANDMARKS, NAMES, draw_shard

RANDOM = APFL(d_primary=40, d_refinement=24, normalise="root", map="random", bits=0)


@pytest.mark.parametrize(
    ("method", "own"),
    [
        (RANDOM, 60),
        (RANDOM, 30),  # fewer rows than columns: the factor travels
        (replace(RANDOM, normalise="standardise", intercept=True), 60),
        (replace(RANDOM, beta=1.0, balance=0.5, tau=0.0), 60),
        (LANDMARKS, 60),
        (replace(LANDMARKS, landmarks="free", normalise="row", scope="client"), 60),
    ],
)
def test_bytes_are_those_that_travel(tmp_path, method, own):
    """Arrays without headers. Integers are squeezed: they weigh at most what is said, and are there."""
    sites = [Site(tmp_path / "sites", f"s{k}", draw_shard(own, k), NAMES) for k in range(3)]
    sent = simulate(sites, Terms("f", method=method), tmp_path / "server")
    told = cost(Size(3 * own, 8, 3, 3, 40), method)
    assert sent.payload_down == 3 * told.down
    if method.map == "random":
        assert sent.payload_up == 3 * told.up
    else:
        assert (told.up - ECHO_BYTES) / 2 < sent.payload_up / 3 <= told.up  # few of the echo's buckets are filled


def test_growth():
    """Four times the rows: four times the site's products, the same bytes. Twice the width: four times the bytes."""
    small = cost(Size(40_000, 256, 10, 10, 1024), LANDMARKS)
    more = cost(Size(160_000, 256, 10, 10, 1024), replace(LANDMARKS, bits=16))
    wide = cost(Size(40_000, 256, 10, 10, 2048), LANDMARKS)
    assert more.statistics["single"] == 4 * small.statistics["single"]
    assert (more.traffic.up["statistics"], more.server_memory) == (small.traffic.up["statistics"], small.server_memory)
    assert wide.contribution["cholesky"] == 8 * small.contribution["cholesky"]
    assert 3.8 < wide.traffic.up["statistics"][0] / small.traffic.up["statistics"][0] < 4
    crowd = cost(Size(40_000, 256, 10, 1000, 1024), LANDMARKS)
    assert crowd.server_memory == small.server_memory
    rates = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9)
    one, other = (each.seconds(rates, 100.0) for each in (small, crowd))
    once = rates.seconds(small.agreed_map)
    assert other["server: contributions"] - once == pytest.approx(100 * (one["server: contributions"] - once))
    thousand = cost(replace(crowd.size, clients=1990), LANDMARKS).seconds(rates, 100.0)
    few, some, many = (each["server: publication"] for each in (one, other, thousand))
    assert many - some == pytest.approx(some - few)  # each contribution is read once more
    assert some > few
    assert one["network, one site"] == pytest.approx((small.up + small.down) * 8 / 100e6)


def test_landmarks_cost_by_where_they_come_from():
    """Of everyone's products, of the squares alone if rows are few, of nobody's rows, or without a map of landmarks."""
    rates = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9)
    size = Size(40_000, 2000, 10, 10, 512)
    full, few, free, none = (
        cost(own, replace(method, gamma="auto"))
        for own, method in (
            (size, LANDMARKS), (replace(size, rows=4000), LANDMARKS), (size, replace(LANDMARKS, landmarks="free")),
            (size, RANDOM),
        )
    )  # fmt: skip
    seconds = [own.seconds(rates, 100.0) for own in (full, few, free, none)]
    moments, landmarks = ([own[name] for own in seconds] for name in ("site: moments", "server: landmarks"))
    assert moments[0] > 10 * moments[1] > 0 == moments[2] == moments[3]
    assert landmarks[0] > landmarks[1] > landmarks[2] > landmarks[3] == 0
    more = cost(replace(size, clients=1000), LANDMARKS).seconds(rates, 100.0)  # whose moments are looked at one by one
    assert more["server: landmarks"] > 50 * landmarks[0]
    assert full.server_memory > few.server_memory == free.server_memory > none.server_memory


def test_a_run_does_once_what_sites_do_each():
    """One process draws one map, checks nobody and compares nobody with going alone. Larger clients cost more a row."""
    rates, method = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9), replace(LANDMARKS, normalise="row", weight="auto")
    few, many = (cost(Size(40_000, 256, 10, clients, 2048), method).seconds(rates, 100.0) for clients in (20, 40))
    sites = few["site: moments"] + few["site: statistics"] + few["site: personal model"]
    assert 0.2 * 20 * sites < few[RUN] < 0.6 * 20 * sites
    assert many[RUN] < few[RUN]
    twice = cost(Size(80_000, 256, 10, 40, 2048), method).seconds(rates, 100.0)
    assert 1.6 < twice[RUN] / few[RUN] < 2


def test_a_pilot_costs_where_there_is_one():
    rates, size = Rates(1e9, 1e9, 1e9, 1e9, 1e9, 1e9), Size(3000, 512, 10, 3, 64)
    auto, given = (cost(size, replace(LANDMARKS, normalise=how)) for how in ("auto", "row"))
    with_one, without = (own.seconds(rates, 100.0) for own in (auto, given))
    assert with_one["site: pilot"] > 0 < with_one["server: pilot"]
    assert without["site: pilot"] == without["server: pilot"] == 0
    assert with_one[RUN] > without[RUN]
    assert with_one["site: statistics"] == without["site: statistics"]
    assert auto.site_memory > given.site_memory  # four maps of 512 landmarks take more than one of 64
    assert auto.server_memory >= given.server_memory
    crowd = cost(replace(size, rows=300_000, clients=300), replace(LANDMARKS, normalise="auto")).seconds(rates, 100.0)
    assert crowd["server: pilot"] > 5 * with_one["server: pilot"]
    assert crowd["site: pilot"] < with_one["site: pilot"]  # of whose rows fewer take part


def test_memory_knows_how_many_points_are_drawn():
    assert LEAST_POINTS == SYNTHETIC


def test_rates_are_those_of_one_thread():
    torch.set_num_threads(2)
    try:
        rates = measured_rates(64)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert all(rate > 0 for rate in vars(rates).values())


def test_the_command_says_it_in_json_and_refuses(capfd):
    arguments = ["cost", "--rows", 900, "--features", 20, "--classes", 3, "--clients", 3, "--width", 64]
    assert here(*arguments, "--json") == 0
    told = json.loads(capfd.readouterr().out)
    made = cost(Size(900, 20, 3, 3, 64))
    assert (told["bytes_up"], told["bytes_down"]) == (made.up, made.down)
    assert told["seconds"].keys() >= {"site: statistics", "server: publication", "network, server"}
    assert here(*arguments) == 0
    assert "memory of the server" in capfd.readouterr().out
    assert here(*arguments, "--set", "map=none") == 2
    with pytest.raises(InputError, match="rows=2 given; it must be 3 or more"):
        Size(2, 20, 3, 3)
