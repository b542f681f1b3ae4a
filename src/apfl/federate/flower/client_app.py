"""What a site does when a message comes: hand it to `apfl.federate.Site`, and send back what that makes of it.

Each message is handled by a fresh process, so rows and state are files. The site's own limits come with the node's
configuration: they are set where the site is, and nothing that a server sends can widen them. A message that the
federation's key did not sign for this site is not handled at all (`apfl.federate.instructions`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from apfl.errors import InputError, printable
from apfl.federate.flower.join import changed_rows
from apfl.federate.flower.telling import tell, tell_warnings
from apfl.federate.flower.wire import Setting, answer, parts
from apfl.federate.instructions import Instruction, Recipient, hashes
from apfl.federate.masked.rosters import read_identity, read_roster
from apfl.federate.masked.site import MaskedSite
from apfl.federate.numbers.site import NumberSite
from apfl.federate.secure import Member
from apfl.federate.site import Site
from apfl.federate.stats.site import StreamedSite
from apfl.federate.terms import Terms
from apfl.files import replacing

__all__ = ["SIMULATED_TARGET", "SIMULATION", "app"]

SIMULATION = "APFL_SIMULATION"  # folder of a simulated federation, whose sites are numbered
SIMULATED_TARGET = "APFL_SIMULATION_TARGET"  # what its sites predict
Payloads = dict[str, bytes]
SPLIT = ("test_fraction", "test_column", "group_column")  # what `join` was given of these; a site has the defaults
TABLE = ("label_column", "feature_column", "features", "drop", "encode", "target")
STATE = "member.state"  # of masked sums, with secrets in it: what a killed process goes on with
Answer = tuple[dict[str, Setting], Payloads]

log = logging.getLogger(__name__)

app = ClientApp()


class Limits:
    """What the site allows, as its own command line said."""

    def __init__(self, config: dict[str, Setting]) -> None:
        self.min_per_class = int(config.get("min-per-class", 1))
        self.contribute = bool(config.get("contribute", True))
        self.report = bool(config.get("report", False))
        self.rejoin = self.contribute and bool(config.get("rejoin", False))
        self.terms = str(config.get("terms", ""))
        self.authority = str(config.get("authority", ""))
        self.roster, self.identity = str(config.get("roster", "")), str(config.get("identity", ""))

    def federation(self, given: bytes) -> str:
        """The federation that may instruct this site: that of the terms it agreed to, or of those that came along."""
        return Terms.from_json(Path(self.terms).read_bytes() if self.terms else given).federation

    def check(self, given: bytes) -> None:
        """Refuse terms under which more would leave than the site agreed to."""
        terms = Terms.from_json(given)
        self.check_masks(terms)
        if terms.min_per_class < self.min_per_class and not (terms.private or terms.numeric):  # noise covers them too
            raise InputError(
                f"the federation shares classes from {terms.min_per_class} rows on; this site agreed to "
                f"{self.min_per_class} or more (--min-per-class)"
            )
        if self.terms:
            agreed = Terms.from_json(Path(self.terms).read_bytes())
            if terms != agreed and (
                not (terms.settled or terms.outlined or terms.trying) or terms.departs_from(agreed)
            ):
                raise InputError(f"the server's terms are not those this site agreed to ({self.terms})")

    def check_masks(self, terms: Terms) -> None:
        """A site with a roster takes part under masks only, and one without a roster cannot."""
        if bool(self.roster) != terms.masked:
            given, needed = ("are masked", "with") if terms.masked else ("have no masks", "without")
            raise InputError(f"the server's terms {given}: join {needed} --roster and --identity")

    def member(self, site: Site, terms: Terms) -> Member:
        """The site as a member of its roster, in the middle of a round if there is one."""
        state = site.home(terms) / STATE
        return Member(
            site.name, read_identity(Path(self.identity)), read_roster(Path(self.roster)),
            federation=terms.federation, minimum=terms.smallest_sum, keep=lambda data: site.write(terms, STATE, data),
            state=state.read_bytes() if state.is_file() else None,
        )  # fmt: skip


def _masked(site: Site, limits: Limits, given: Payloads) -> Answer:
    """The answer to one phase of a masked sum."""
    limits.check(given["terms"])
    terms, phase = Terms.from_json(given["terms"]), given["phase"].decode(errors="replace")
    publication = _kept_publication(site, given) if "publication" in given else None
    masked = MaskedSite(site, limits.member(site, terms), report=limits.report)
    told = (given.get(name) for name in ("pilot", "primaries"))
    data = masked.answer(phase, given["question"], given["terms"], given.get("counts"), publication, *told)
    if phase == "mask":
        _say(f"takes part in {terms.federation}: sends a masked vector, {len(data):,} bytes")
    return {}, {"answer": data}


def _describe(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    return {}, {"description": site.describe(given["terms"])}


def _pilot(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    return {}, {"statistics": site.pilot(given["terms"], given["pilot"])}


def _pilot_table(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    return {}, {"table": site.pilot_table(given["terms"], given["primaries"])}


def _spread(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    return {}, {"spread": site.spread(given["terms"])}


def _statistics(site: Site, limits: Limits, given: Payloads) -> Answer:
    limits.check(given["terms"])
    data = site.statistics(given["terms"])
    _say(f"takes part in {Terms.from_json(given['terms']).federation}: sends its statistics, {len(data):,} bytes")
    return {}, {"statistics": data}


def _rejoin(site: Site, limits: Limits, given: Payloads) -> Answer:
    """New statistics if the rows have changed and the site wants to rejoin; otherwise nothing leaves, not even that."""
    limits.check(given["terms"])
    terms, digest = Terms.from_json(given["terms"]), given["digest"].decode()
    if limits.rejoin:
        return {}, site.rejoin(given["terms"], digest)
    how = site.changed(terms, digest)
    if how is not None:
        tell(changed_rows(terms.federation, how))
    return {}, {}


def _return(site: Site, limits: Limits, given: Payloads) -> Answer:
    """New statistics of a site that has left, if it wants to come back; those that were taken out never count again."""
    limits.check(given["terms"])
    federation = Terms.from_json(given["terms"]).federation
    if not limits.rejoin:
        tell(f"this site has left {federation}, and its key is admitted again; to take part again, join with --rejoin")
        return {"declined": "it has left, and was not started with --rejoin"}, {}
    data = site.statistics(given["terms"], again=True)
    _say(f"takes part in {federation} again: sends new statistics, {len(data):,} bytes")
    return {}, {"statistics": data}


def _sent(site: Site, limits: Limits, given: Payloads) -> Answer:
    return {}, {"statistics": site.sent(given["terms"], given["digest"].decode())}


def _table(site: Site, limits: Limits, given: Payloads) -> Answer:
    kept = _kept_publication(site, given)
    if isinstance(site, NumberSite):
        return {}, {"table": site.table(given["terms"], kept, given.get("choice", b""))}
    return {}, {"table": site.table(given["terms"], kept)}


def _refine(site: Site, limits: Limits, given: Payloads) -> Answer:
    path = site.refine(given["terms"], _kept_publication(site, given), given["choice"])
    terms = Terms.from_json(given["terms"])
    _say(f"fitted its model to publication {site.publication(terms)} of {terms.federation}: {path}")
    in_the_clear = not (terms.masked or terms.private or terms.numeric)  # under masks in a sum
    reports = limits.report and site.test is not None and in_the_clear
    return {}, {"metrics": site.metrics(given["terms"])} if reports else {}


def _evaluate(site: Site, limits: Limits, given: Payloads) -> Answer:
    terms = Terms.from_json(given["terms"])
    if not limits.report or site.test is None or terms.private or terms.numeric:
        return {"declined": "this site does not report metrics"}, {}
    return {}, {"metrics": site.metrics(given["terms"])}


def _say(text: str) -> None:
    """Tell the site's user; in a simulation there are many sites, and one person at the server."""
    if SIMULATION not in os.environ:
        tell(text)


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


CONTRIBUTING = (_describe, _pilot, _pilot_table, _spread, _statistics, _masked)


def _handler(handle: Callable[[Site, Limits, Payloads], Answer]) -> Callable[[Message, Context], Message]:
    def answered(message: Message, context: Context) -> Message:
        config = _configuration(context)
        limits, name = Limits(config), str(config["name"])
        settings: dict[str, Setting] = {"name": name}
        payloads: Payloads = {}
        try:
            given = _instructed(message, context, limits, Path(str(config["folder"])), name)
            if handle in CONTRIBUTING and not limits.contribute:
                settings["declined"] = "this site takes part without contributing"
            else:
                limits.check_masks(Terms.from_json(given["terms"]))
                site = _site(config, name)
                if "landmarks" in given:
                    site.keep_landmarks(given["terms"], given["landmarks"])
                more, payloads = handle(site, limits, given)
                settings |= more
        except (InputError, KeyError) as error:
            settings["failed"] = printable(error)
        return Message(answer(payloads, settings), reply_to=message)

    return answered


def _instructed(message: Message, context: Context, limits: Limits, folder: Path, name: str) -> Payloads:
    """What came with a message, if the federation's key signed it for this site; the reason is for the site's log."""
    try:
        settings, given = parts(message)
        run, node, kind = str(context.run_id), str(context.node_id), message.metadata.message_type
        expected = Instruction(limits.federation(given.get("terms", b"")), run, node, name, kind, hashes(given))
        authority = Path(limits.authority).read_bytes() if limits.authority else None
        Recipient(folder, name, node, authority).accept(settings, expected)
    except (InputError, OSError) as error:
        log.error("refused an instruction (%s): %s", printable(message.metadata.message_type, 60), printable(error))
        raise InputError("this site refused the instruction; its log says why") from error
    return given


def _configuration(context: Context) -> dict[str, Setting]:
    """The node's configuration; a simulated node finds its own by its number."""
    config: dict[str, Setting] = dict(context.node_config)
    simulated = os.environ.get(SIMULATION)
    if simulated and "name" not in config:
        name = f"site-{int(config['partition-id']):03d}"
        home = Path(simulated) / "sites" / name
        config |= {"name": name, "folder": str(home), "data": str(home / "features.npz"), "report": True}
        config |= {"test-column": "test", "target": os.environ.get(SIMULATED_TARGET, "classification")}
    return config


def _site(config: dict[str, Setting], name: str) -> Site:
    if config.get("statistics"):
        return StreamedSite(str(config["folder"]), name, str(config["statistics"]))
    split = {key: config[key.replace("_", "-")] for key in (*SPLIT, *TABLE) if key.replace("_", "-") in config}
    return Site.from_file(str(config["folder"]), name, str(config["data"]), **split)  # type: ignore[arg-type]


tell_warnings(logging.getLogger("apfl.federate.site"))
app.query("describe")(_handler(_describe))
app.train("pilot")(_handler(_pilot))
app.train("pilot_table")(_handler(_pilot_table))
app.train("spread")(_handler(_spread))
app.train("statistics")(_handler(_statistics))
app.train("masked")(_handler(_masked))
app.train("rejoin")(_handler(_rejoin))
app.train("return")(_handler(_return))
app.train("sent")(_handler(_sent))
app.train("table")(_handler(_table))
app.train("refine")(_handler(_refine))
app.evaluate("metrics")(_handler(_evaluate))
