"""``apfl federate keys``, ``join`` and ``simulate``; and what these share with the server's commands."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.options import assignment
from apfl.cli.progress import err, out
from apfl.errors import InputError, optional
from apfl.federate import Site, Terms
from apfl.federate.flower.join import PATIENCE, Connection, stay_connected
from apfl.federate.flower.processes import is_loopback, split_address
from apfl.federate.status import status_of
from apfl.report.terminal import status_view

__all__ = [
    "JsonOption",
    "SetOption",
    "end_as_interrupted",
    "join",
    "keys",
    "method_settings",
    "need_flower",
    "refuse_predict",
    "simulate",
    "status_of_folder",
]
N_LINES = 8  # of what happened last, below a status that is watched

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for other programs.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting of the method: KEY=VALUE (see `apfl methods apfl`). Repeatable."),
]


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; the server reads keys/ in its own folder.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which sites reach the server. Repeatable.")
    ] = None,
    site: Annotated[list[str] | None, typer.Option(help="Make a key pair for this site. Repeatable.")] = None,
    days: Annotated[int, typer.Option(help="Days for which the server's certificate is valid.", min=1)] = 825,
) -> None:
    """Make certificates for the server (--host) and key pairs for sites (--site).

    A site can make its own pair and send only NAME.pub. Whoever holds NAME.key can act as that site.
    """
    need_flower()
    from apfl.federate.flower.keys import make_certificates, make_site_key

    if not (host or site):
        raise InputError("nothing to make: give --host NAME for the server's certificate, --site NAME for key pairs")
    if host:
        made = make_certificates(folder, host, days)
        out.print(f"{made.certificate} for {', '.join(host)}; sites need {made.authority}", soft_wrap=True)
    for name in site or []:
        private, public = make_site_key(folder, name)
        out.print(f"{private} goes to {name} and nowhere else; {public} stays with the server", soft_wrap=True)


def join(
    server: Annotated[str, typer.Option(help="Server to connect to, HOST:PORT.")],
    data: Annotated[str, typer.Option(help="Features file with labels (.npz, .csv, .parquet).")],
    name: Annotated[str, typer.Option(help="Name of this site, the same as in its key's file name.")],
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
    show: Annotated[
        bool, typer.Option("--show-what-leaves", help="List what would leave this site, and stop.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Send what is listed without asking for confirmation.")] = False,
    min_per_class: Annotated[
        int, typer.Option(help="Refuse a federation that shares classes with fewer rows than this.", min=1)
    ] = Terms.min_per_class,
    contribute: Annotated[
        bool, typer.Option("--contribute/--only-receive", help="Send statistics, or only receive the primary.")
    ] = True,
    report: Annotated[
        bool, typer.Option("--report", help="Report the accuracy on this site's test rows to the server.")
    ] = False,
    test_column: Annotated[str | None, typer.Option(help="Column that is true for test rows.")] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows for testing.", min=0, max=0.9)] = 0.0,
    group_column: Annotated[
        str | None,
        typer.Option(help="Column of groups; rows of one group (a patient, say) stay on one side of the split."),
    ] = None,
    predict: Annotated[str | None, typer.Option(hidden=True)] = None,
    patience: Annotated[
        float, typer.Option(help="Seconds to keep trying while the server rejects the key.")
    ] = PATIENCE,
) -> None:
    """Take part in a federation with the rows of one file.

    First lists exactly what will be sent, and asks for confirmation. Rows never
    leave this machine. The personal model is written to
    FOLDER/FEDERATION/NAME/model.safetensors; `apfl predict` uses it offline.
    """
    refuse_predict(predict is not None)
    _check_connection(server, name, ca, insecure)
    _check_files(ca, key, terms)
    folder = folder or Path("sites") / name
    split = {"test_column": test_column, "test_fraction": test_fraction, "group_column": group_column}
    site = Site.from_file(folder, name, data, **split)  # type: ignore[arg-type]
    agreement = terms.read_bytes() if terms else Terms("unknown", min_per_class=min_per_class).to_json().encode()
    err.print(f"What leaves {name}" + ("" if terms else ", under the default terms (pass --terms to be exact)") + ":")
    for line in site.what_leaves(agreement).lines() if contribute else ["nothing: this site only receives"]:
        err.print(f"  - {line}", highlight=False, soft_wrap=True)
    if show:
        return
    need_flower()
    if not yes and not typer.confirm("May this leave?", err=True):
        raise InputError("nothing was sent")
    rows = str(Path(data).absolute()) if Path(data).exists() else data
    config: dict[str, Any] = {
        "min-per-class": min_per_class, "contribute": contribute, "report": report, "test-fraction": test_fraction,
        "test-column": test_column or "", "group-column": group_column or "",
        "terms": str(terms.absolute()) if terms else "",
    }  # fmt: skip
    connection = Connection(folder, name, rows, server, None if insecure else ca, key, config)
    end_as_interrupted()
    try:
        stay_connected(
            connection, folder / "supernode.log", lambda line: err.print(f"{name}: {line}", soft_wrap=True), patience
        )
    except KeyboardInterrupt:
        err.print(f"{name}: disconnected; what it contributed counts until `apfl federate leave`")


def _check_connection(server: str, name: str, ca: Path | None, insecure: bool) -> None:
    address, _ = split_address(server)
    if ca is None and not insecure and not is_loopback(address):
        raise InputError(f"{server} is another machine: give --ca ca.crt and --key {name}.key, or accept --insecure")


def _check_files(*paths: Path | None) -> None:
    for path in paths:
        if path is not None and not path.is_file():
            raise InputError(f"there is no file {path}")


def simulate(
    data: Annotated[str, typer.Option(help="Data, as for `apfl run`: 'digits' or a features file.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of sites.", min=2)] = 10,
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration; smaller means more heterogeneous.")] = 0.5,
    partition: Annotated[str, typer.Option(help="Partition of rows into sites, as for `apfl run`.")] = "dirichlet",
    seed: Annotated[int, typer.Option(help="Seed of the partition and the maps.", min=0)] = 0,
    folder: Annotated[
        Path | None, typer.Option("--out", help="Folder of the federation. \\[default: runs/federation-TIME]")
    ] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole federation on this machine, in Flower's simulation engine."""
    need_flower()
    from apfl.experiments.run import Protocol
    from apfl.federate.flower.simulate import simulate as simulated

    folder = folder or Path("runs") / f"federation-{time.strftime('%Y%m%d-%H%M%S')}"
    protocol = Protocol(partition, clients, alpha)
    terms = Terms.checked(
        {"federation": "simulated", "seed": seed, "quorum": clients, "method": method_settings(settings)}
    )
    simulated(folder, data, protocol, seed, terms, as_json=as_json)
    out.print(status_of_folder(folder, as_json)(), soft_wrap=as_json)
    if not as_json:
        out.print(f"models: {folder}/sites/*/simulated/*/model.safetensors", soft_wrap=True)


def method_settings(assignments: list[str] | None) -> dict[str, str]:
    """What --set says."""
    return dict(assignment(text, "d_primary=1024") for text in assignments or [])


def status_of_folder(folder: Path, as_json: bool, recent: bool = False) -> Callable[[], Any]:
    """How to see where a federation stands: each call looks anew."""
    from apfl.federate.flower.events import Events, in_words

    def view() -> Any:
        found = status_of(folder)
        if as_json:
            return json.dumps(found)
        expected = [path.stem for path in (folder / "keys").glob("*.pub")]
        lines = [in_words(event) for _, event in Events.read(folder / "events.jsonl")][-N_LINES:] if recent else []
        return status_view(found, expected, lines)

    return view


def end_as_interrupted() -> None:
    """SIGTERM, which service managers send, ends as Ctrl-C does: children first."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def refuse_predict(given: bool) -> None:
    """A server no longer has sites predict."""
    if given:
        raise InputError(
            "--predict given; a server no longer has sites predict. At the site, use its own model: "
            "apfl predict FOLDER/FEDERATION/NAME/model.safetensors FILE"
        )


def need_flower() -> None:
    """One line that says what to install, where Flower is missing."""
    optional("flwr", "flower")
