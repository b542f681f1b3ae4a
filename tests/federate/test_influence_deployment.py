"""A member that lies, with real processes: honest sites say so to the people who run them."""

from __future__ import annotations

import pytest

from apfl.data.federation import Shard
from apfl.models.file import read
from tests.federate.world import world

pytest.importorskip("flwr", reason="needs the flower extra: pip install 'apfl[flower]'")
pytestmark = pytest.mark.deployment


def test_an_honest_site_says_that_it_goes_without_the_primary(tmp_path):
    with world(tmp_path, ["honest", "liar"], secure=False, d_primary=64, balance=0.0) as w:
        liar = w.train["liar"]
        w.train["liar"] = Shard(liar.features, (liar.labels + 1) % 10)
        w.write("liar")
        w.server()
        for name in ("honest", "liar"):
            w.join(name)
        w.connected("honest", "liar")
        w.finish(w.run())
        w.until(lambda: "The site's model was fitted without it" in w.log("honest"), "the warning")
        assert read(w.root / "honest" / "site" / "server" / "honest" / "model.safetensors").settings["alone"]
        shown = {row["name"]: row["influence"] for row in w.json("federate", "status", w.folder)["clients"]}
        assert shown["liar"] > 0.3
        assert "%" in w.apfl("federate", "status", w.folder)
