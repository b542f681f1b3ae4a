"""``apfl federate join`` and ``simulate``."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apfl.cli.federation import (
    JsonOption,
    SetOption,
    method_settings,
    need_flower,
    refuse_predict,
    status_of_folder,
)
from apfl.cli.options import (
    TABLE,
    ClientColumnOption,
    GroupColumnOption,
    PartitionOption,
    TestColumnOption,
    data_options,
)
from apfl.cli.progress import end_as_interrupted, err, out
from apfl.data.source import Source
from apfl.data.tables import listed
from apfl.errors import InputError, printable
from apfl.federate.flower.join import PATIENCE, Connection, changed_rows, stay_connected
from apfl.federate.flower.processes import is_loopback, split_address
from apfl.files import make_private

if TYPE_CHECKING:
    from apfl.federate import Site

__all__ = ["join", "simulate"]


@data_options(only=(*TABLE, "encode", "target"))
def join(
    server: Annotated[str, typer.Option(help="Server to connect to, HOST:PORT.")],
    name: Annotated[str, typer.Option(help="Name of this site, the same as in its key's file name.")],
    data: Annotated[
        str | None, typer.Option(help="Features file or table with labels (.npz, .csv, .parquet).", show_default=False)
    ] = None,
    statistics: Annotated[
        Path | None,
        typer.Option(
            help="Instead of --data: part that `apfl stats` made of a site of any size, or folder with the parts of "
            "all passes.",
            show_default=False,
        ),
    ] = None,
    folder: Annotated[
        Path | None, typer.Option(help="Folder of this site: model, log, what was sent. \\[default: sites/NAME]")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificate authority of the server, ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option(help="Private key of this site, NAME.key.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="Connect without TLS; anyone on the network path can read the messages.")
    ] = False,
    terms: Annotated[
        Path | None, typer.Option(help="Terms of the server, terms.json; take part only under these.")
    ] = None,
    roster: Annotated[
        Path | None, typer.Option(help="Roster of this site, for masked sums; compare its fingerprint first.")
    ] = None,
    identity: Annotated[Path | None, typer.Option(help="Identity of this site on the roster, NAME.identity.")] = None,
    fingerprint: Annotated[
        str | None,
        typer.Option(help="Fingerprint of the roster as the other sites have it; without it, join asks whether it is."),
    ] = None,
    show: Annotated[
        bool, typer.Option("--show-what-leaves", help="List what would leave this site, and stop.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send what is listed without asking for confirmation.")] = False,
    min_per_class: Annotated[
        int | None,
        typer.Option(help="Refuse a federation that shares classes with fewer rows than this. \\[default: 2]", min=1),
    ] = None,
    contribute: Annotated[
        bool, typer.Option("--contribute/--only-receive", help="Send statistics, or only receive the primary.")
    ] = True,
    rejoin: Annotated[
        bool,
        typer.Option(
            "--rejoin",
            help="If the rows have changed since they were contributed, leave and join with them in one step. A site "
            "that left comes back, if the server admits its key again.",
        ),
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Report the accuracy on this site's test rows to the server.")
    ] = False,
    test_column: TestColumnOption = None,
    test_fraction: Annotated[
        float | None, typer.Option(help="Share of the rows for testing. \\[default: none]", min=0, max=0.9)
    ] = None,
    group_column: GroupColumnOption = None,
    predict: Annotated[str | None, typer.Option(hidden=True)] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds to keep trying while the server rejects the key.")
    ] = PATIENCE,
    *,
    source: Source,
) -> None:
    """Take part in a federation with the rows of one file, or with the sums of many.

    First lists exactly what will be sent, and asks for confirmation. Rows never
    leave this machine. The personal model is written to
    FOLDER/FEDERATION/NAME/model.safetensors; `apfl predict` uses it offline.
    """
    refuse_predict(predict is not None)
    _check_connection(server, name, ca, key, insecure)
    _check_files(ca, key, terms, roster, identity)
    _check_together(roster, identity, rejoin, contribute)
    _check_masks(terms, roster)
    folder = folder or Path("sites") / name
    split = {"test_column": test_column, "test_fraction": test_fraction, "group_column": group_column}
    split |= {option: getattr(source, option) for option in (*TABLE, "target")} | {"encode": _encoding(source)}
    given = {key: value for key, value in split.items() if value is not None}  # the site has the defaults
    _check_quotes(given)
    _check_rows(data, statistics, given)
    from apfl.federate import Terms  # here: what was given wrongly is said without torch, which takes seconds

    min_per_class = min_per_class or Terms.min_per_class
    site = _site(folder, name, data, statistics, given)
    _tell_what_leaves(site, terms, min_per_class, contribute, masked=roster is not None)
    _tell_features(site)
    _tell_changes(site, rejoin)
    found = "" if roster is None or identity is None else _tell_roster(name, roster, identity)
    _check_fingerprint(found, fingerprint)
    if show:
        return
    need_flower()
    _confirm(yes, bool(found) and fingerprint is None)
    config: dict[str, Any] = {
        "min-per-class": min_per_class, "contribute": contribute, "rejoin": rejoin, "report": report,
        "terms": _absolute(terms), "authority": "" if insecure else _absolute(ca),
        "roster": _absolute(roster), "identity": _absolute(identity), "statistics": _absolute(statistics),
        **{key.replace("_", "-"): value for key, value in given.items()},
    }  # fmt: skip
    _connect(Connection(folder, name, _rows_of(data), server, None if insecure else ca, key, config), patience)


def _check_fingerprint(found: str, given: str | None) -> None:
    """Refuse another roster than the other sites have."""
    if given is None:
        return
    if not found:
        raise InputError("--fingerprint given without --roster: it is the roster's")
    if given.replace(" ", "").lower() != found:
        raise InputError(
            f"the roster has fingerprint {found}, and {printable(given, 80)} was given: this is not the roster of the "
            "other sites. Nothing was sent"
        )


def _confirm(yes: bool, roster: bool) -> None:
    """Ask whether the roster is that of the other sites, and whether all this may leave."""
    questions = [*(["Do the other sites have the same fingerprint?"] if roster else []), "May this leave?"]
    if not yes and not all(typer.confirm(question, err=True) for question in questions):
        raise InputError("nothing was sent")


def _rows_of(data: str | None) -> str:
    """The path of the rows from anywhere, or the name of a dataset."""
    return str(Path(data).absolute()) if data and Path(data).exists() else data or ""


def _check_masks(terms: Path | None, roster: Path | None) -> None:
    """Refuse masked terms without a roster, and a roster under plain ones: the site would refuse every question."""
    if terms is None:
        return
    try:
        masked = bool(json.loads(terms.read_text(encoding="utf-8")).get("masked", False))
    except (OSError, ValueError, AttributeError):
        return  # what is wrong with the file is said where it is read
    if masked and roster is None:
        raise InputError(
            f"{terms} has masked terms, under which a site needs the roster that it confirmed: give --roster and "
            "--identity (`apfl federate roster` at the server writes the roster)"
        )
    if roster is not None and not masked:
        raise InputError(f"--roster given, but {terms} has plain terms: leave --roster and --identity out")


def _check_together(roster: Path | None, identity: Path | None, rejoin: bool, contribute: bool) -> None:
    """Refuse options of which one means nothing without, or beside, the other."""
    if (roster is None) != (identity is None):
        raise InputError("--roster and --identity belong together: a site masks as the member that its identity makes")
    if rejoin and not contribute:
        raise InputError("--rejoin and --only-receive given; a site that only receives has nothing to join with")


def _check_rows(data: str | None, statistics: Path | None, given: dict[str, Any]) -> None:
    """Rows come from a file, or their sums from parts."""
    if (data is None) == (statistics is None):
        raise InputError("give the rows of this site with --data, or the parts of `apfl stats` with --statistics")
    if statistics is None:
        return
    if given:
        option = next(iter(given)).replace("_", "-")
        raise InputError(f"--{option} and --statistics given; a part has no rows to choose from: leave the option out")
    if not statistics.exists():
        raise InputError(f"there is no file or folder {statistics}; make the parts with `apfl stats`")


def _site(folder: Path, name: str, data: str | None, statistics: Path | None, given: dict[str, Any]) -> Site:
    if statistics is not None:
        from apfl.federate.stats.site import StreamedSite

        return StreamedSite(folder, name, statistics)
    from apfl.federate import Site

    return Site.from_file(folder, name, data or "", **given)


def _absolute(path: Path | None) -> str:
    return "" if path is None else str(path.absolute())


def _connect(connection: Connection, patience: float) -> None:
    """Stay connected until the user interrupts; what is written from here on is private."""
    folder, name = connection.folder, connection.name
    os.umask(0o077)
    for kept in (folder / "flower", folder / "supernode.log", *folder.glob(f"*/{name}")):
        make_private(kept)  # an earlier version left them readable
    end_as_interrupted()
    try:
        stay_connected(
            connection, folder / "supernode.log", lambda line: err.print(f"{name}: {line}", soft_wrap=True), patience
        )
    except KeyboardInterrupt:
        err.print(f"{name}: disconnected; what it contributed counts until `apfl federate leave`")


def _tell_what_leaves(site: Site, terms: Path | None, min_per_class: int, contribute: bool, *, masked: bool) -> None:
    """List what the site would send, under the server's terms or the default ones: masked for a site with a roster."""
    from apfl.federate import Terms
    from apfl.federate.disclosure import default_masked

    default: dict[str, Any] = {}
    if site.train.target != "classification":
        default = {"target": site.train.target, "class_names": site.class_names, "quorum": 3, "min_cohort": 2}
    elif masked and not terms:
        default = default_masked(site.class_names, site.train.features.shape[1])
    agreement = (
        terms.read_bytes() if terms else Terms("unknown", min_per_class=min_per_class, **default).to_json().encode()
    )
    under = "" if terms else ", under the default terms (pass --terms to be exact)"
    err.print(f"What leaves {site.name}{under}:")
    for line in site.what_leaves(agreement).lines() if contribute else ["nothing: this site only receives"]:
        err.print(f"  - {printable(line, 10_000)}", highlight=False, soft_wrap=True)


def _tell_roster(name: str, roster: Path, identity: Path) -> str:
    """Say who may be in a sum with this site, after a check that the site itself may; the roster's fingerprint."""
    from apfl.federate.masked.rosters import read_identity, read_roster
    from apfl.federate.secure import Member

    members = Member(name, read_identity(identity), read_roster(roster), federation="?").roster
    err.print(
        f"{name}: masked with {listed(list(members.names))}; {members.threshold} of {len(members)} must answer. "
        f"Compare the roster's fingerprint with the other sites': {members.fingerprint}",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    return members.fingerprint


def _tell_features(site: Site) -> None:
    """A server sees how many features there are, not what they are called."""
    if names := site.about.get("feature_names"):
        sentence = f"features: {listed(names)}; all sites must have the same, in this order (--features sets it)"
        err.print(f"{site.name}: {printable(sentence, 2000)}", highlight=False, soft_wrap=True)


def _tell_changes(site: Site, rejoin: bool) -> None:
    """Say that the rows are no longer those that were contributed."""
    for federation, how in site.changes().items():
        sentence = changed_rows(federation, how)
        if rejoin:
            sentence = f"with the next run these rows take the place of those contributed to {federation} ({how})"
        err.print(f"{site.name}: {sentence}", style="yellow", highlight=False, markup=False, soft_wrap=True)


def _check_connection(server: str, name: str, ca: Path | None, key: Path | None, insecure: bool) -> None:
    """Refuse what could only be turned away, again and again: a server with certificates admits sites by their keys."""
    address, _ = split_address(server)
    if not insecure and (ca is None) != (key is None):
        given, other = ("--ca", f"--key {name}.key") if key is None else ("--key", "--ca ca.crt")
        raise InputError(f"{given} given without {other}: a server that has certificates admits sites by their keys")
    if ca is None and not insecure and not is_loopback(address):
        raise InputError(f"{server} is another machine: give --ca ca.crt and --key {name}.key, or accept --insecure")


def _check_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.is_file():
            raise InputError(f"there is no file {path}")


def _encoding(source: Source) -> str | None:
    """The file of the encoding, wherever the process is that reads it."""
    given = source.encode
    return str(Path(given).absolute()) if given is not None and Path(given).is_file() else given


def _check_quotes(given: dict[str, Any]) -> None:
    """Flower's configuration of a site holds no text with quotes in it."""
    for option, value in given.items():
        if isinstance(value, str) and '"' in value:
            raise InputError(f"--{option.replace('_', '-')} {value} given; rename the column: no quotes are allowed")


@data_options(only=("data", *TABLE, "encode", "categories", "target"))
def simulate(
    clients: Annotated[
        int | None,
        typer.Option(
            help="Number of sites. \\[default: 10, unless --client-column names them]", min=2, show_default=False
        ),
    ] = None,
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration; smaller means more heterogeneous.")] = 0.5,
    partition: PartitionOption = None,
    client_column: ClientColumnOption = None,
    seed: Annotated[int, typer.Option(help="Seed of the partition and the maps.", min=0)] = 0,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the federation. \\[default: runs/federation-TIME]")
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
    *,
    source: Source,
) -> None:
    """Run the whole federation on this machine, in Flower's simulation engine."""
    need_flower()
    from apfl.data.protocol import protocol_of
    from apfl.federate import Terms
    from apfl.federate.flower.simulate import simulate as simulated

    folder = folder or Path("runs") / f"federation-{time.strftime('%Y%m%d-%H%M%S')}"
    protocol = protocol_of(clients, alpha, partition, client_column)
    agreed = {"federation": "simulated", "seed": seed, "method": method_settings(settings)}
    names = simulated(folder, source, protocol, seed, Terms.checked(agreed), as_json=as_json)
    out.print(status_of_folder(folder, as_json)(), soft_wrap=as_json)
    if not as_json:
        out.print("plain: in a simulation one process sees all rows, so masks would hide nothing", soft_wrap=True)
        if client_column is not None:
            sentence = listed([f"{site} is {printable(name, 60)}" for site, name in names.items()])
            out.print(f"sites: {sentence}", soft_wrap=True, highlight=False)
        out.print(f"models: {folder}/sites/*/simulated/*/model.safetensors", soft_wrap=True)
