"""What a site does when a message comes: hand it to `apfl.federate.Site`, and send back what that makes of it.

Each message is handled by a fresh process, so rows and state are files. The site's own limits come with the node's
configuration: they are set where the site is, and nothing that a server sends can widen them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from apfl.errors import InputError
from apfl.federate.flower.wire import Setting, content, parts
from apfl.federate.site import Site
from apfl.federate.terms import Terms
from apfl.files import replacing

__all__ = ["SIMULATION", "app"]

SIMULATION = "APFL_SIMULATION"  # folder of a simulated federation, whose sites are numbered
Payloads = dict[str, bytes]
Answer = tuple[dict[str, Setting], Payloads]

app = ClientApp()


class Limits:
    """What the site allows, as its own command line said."""

    def __init__(self, config: dict[str, Setting]) -> None:
        self.min_per_class = int(config.get("min-per-class", 1))
        self.contribute = bool(config.get("contribute", True))
        self.report = bool(config.get("report", False))
        self.terms = str(config.get("terms", ""))

    def check(self, given: bytes) -> None:
        """Refuse terms under which more would leave than the site agreed to."""
        terms = Terms.from_json(given)
        if terms.min_per_class < self.min_per_class:
            raise InputError(
                f"the federation shares classes from {terms.min_per_class} rows on; this site agreed to "
                f"{self.min_per_class} or more (--min-per-class)"
            )
        if self.terms:
            agreed = Terms.from_json(Path(self.terms).read_bytes())
            if terms != agreed and (not terms.settled or terms.departs_from(agreed)):
                raise InputError(f"the server's terms are not those this site agreed to ({self.terms})")


def _describe(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    return {}, {"description": site.describe(given["terms"])}


def _statistics(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    return {}, {"statistics": site.statistics(given["terms"])}


def _sent(site: Site, limits: Limits, given: Payloads) -> Answer:
    return {}, {"statistics": site.sent(given["terms"], given["digest"].decode())}


def _table(site: Site, limits: Limits, given: Payloads) -> Answer:
    kept = _kept_publication(site, given)
    return {}, {"table": site.table(given["terms"], kept)}


def _refine(site: Site, limits: Limits, given: Payloads) -> Answer:
    site.refine(given["terms"], _kept_publication(site, given), given["choice"])
    return {}, {"metrics": site.metrics(given["terms"])} if limits.report and site.test is not None else {}


def _evaluate(site: Site, limits: Limits, given: Payloads) -> Answer:
    if not limits.report or site.test is None:
        return {"declined": "this site does not report metrics"}, {}
    return {}, {"metrics": site.metrics(given["terms"])}


def _kept_publication(site: Site, given: Payloads) -> bytes:
    """The publication that came along, kept for the next message; or the one kept before."""
    path = site.home(Terms.from_json(given["terms"])) / "publication.safetensors"
    if "publication" in given:
        with replacing(path) as temporary:
            temporary.write_bytes(given["publication"])
        return given["publication"]
    if not path.is_file():
        raise InputError(f"{site.name} has no publication; it must be sent again")
    return path.read_bytes()


def _handler(handle: Callable[[Site, Limits, Payloads], Answer]) -> Callable[[Message, Context], Message]:
    def answer(message: Message, context: Context) -> Message:
        config = _configuration(context)
        limits, name = Limits(config), str(config["name"])
        settings: dict[str, Setting] = {"name": name}
        payloads: Payloads = {}
        try:
            if handle in (_describe, _statistics) and not limits.contribute:
                settings["declined"] = "this site takes part without contributing"
            else:
                more, payloads = handle(_site(config, name), limits, parts(message)[1])
                settings |= more
        except (InputError, KeyError) as error:
            settings["failed"] = " ".join(str(error).split())
        return Message(content(payloads, settings), reply_to=message)

    return answer


def _configuration(context: Context) -> dict[str, Setting]:
    """The node's configuration; a simulated node finds its own by its number."""
    config: dict[str, Setting] = dict(context.node_config)
    simulated = os.environ.get(SIMULATION)
    if simulated and "name" not in config:
        name = f"site-{int(config['partition-id']):03d}"
        home = Path(simulated) / "sites" / name
        config |= {"name": name, "folder": str(home), "data": str(home / "features.npz"), "report": True}
        config |= {"test-column": "test"}
    return config


def _site(config: dict[str, Setting], name: str) -> Site:
    return Site.from_file(
        str(config["folder"]), name, str(config["data"]), test_fraction=float(config.get("test-fraction", 0.0)),
        test_column=str(config.get("test-column", "")) or None,
        group_column=str(config.get("group-column", "")) or None,
    )  # fmt: skip


app.query("describe")(_handler(_describe))
app.train("statistics")(_handler(_statistics))
app.train("sent")(_handler(_sent))
app.train("table")(_handler(_table))
app.train("refine")(_handler(_refine))
app.evaluate("metrics")(_handler(_evaluate))
