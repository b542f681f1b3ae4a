"""``apfl federate``: a federation between machines, or all of one on this machine."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.live import Live

from apfl.container import replacing
from apfl.deploy import Coordinator, Site, Terms
from apfl.deploy.status import status_of
from apfl.errors import InputError
from apfl.extras import optional
from apfl.report.federation import status_view

__all__ = ["app"]

app = typer.Typer(
    help="Run a federation between machines, on Flower; or simulate one on this machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
out, err = Console(), Console(stderr=True)
N_LINES = 8  # of what happened last, below a status that is watched

FolderArgument = Annotated[Path, typer.Argument(help="The server's folder for this federation.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for other programs.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="KEY=VALUE, a setting of the method (see `apfl methods apfl`). Repeatable."),
]


@app.command()
def keys(
    folder: Annotated[Path, typer.Argument(help="Where to write them; the server looks in its folder's keys/.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which sites reach the server. Repeatable.")
    ] = None,
    site: Annotated[list[str] | None, typer.Option(help="Make a key pair for this site. Repeatable.")] = None,
    days: Annotated[int, typer.Option(help="How long the server's certificate is valid.", min=1)] = 825,
) -> None:
    """Make certificates for the server (--host) and key pairs for sites (--site).

    A site can make its own pair and send only NAME.pub: who has NAME.key is that site.
    """
    _flower()
    from apfl.flower.keys import make_certificates, make_site_key

    if not (host or site):
        raise InputError("nothing to make: give --host NAME for the server's certificate, --site NAME for key pairs")
    if host:
        made = make_certificates(folder, host, days)
        out.print(f"{made.certificate} for {', '.join(host)}; sites need {made.authority}", soft_wrap=True)
    for name in site or []:
        private, public = make_site_key(folder, name)
        out.print(f"{private} goes to {name} and nowhere else; {public} stays with the server", soft_wrap=True)


@app.command()
def server(
    folder: FolderArgument,
    name: Annotated[str | None, typer.Option(help="Of the federation. [default: the folder's]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The one port sites must reach.", min=1, max=65535)] = 9091,
    secure: Annotated[
        bool | None,
        typer.Option("--secure/--insecure", help="TLS and known keys only. [default: on, unless on loopback]"),
    ] = None,
    quorum: Annotated[int | None, typer.Option(help="Sites needed before anything is published. [default: 2]")] = None,
    min_cohort: Annotated[
        int | None, typer.Option(help="Fold late sites in by at least so many at a time. [default: 1]")
    ] = None,
    min_per_class: Annotated[
        int | None, typer.Option(help="Rows below which a site withholds a class. [default: 2]")
    ] = None,
    wire: Annotated[str | None, typer.Option(help="float64 or float32. [default: float64]")] = None,
    keep_contributions: Annotated[
        bool | None,
        typer.Option("--keep-contributions/--no-keep-contributions", help="Or only their sum. [default: keep]"),
    ] = None,
    classes: Annotated[str | None, typer.Option(help="Class names with commas. [default: what sites have]")] = None,
    seed: Annotated[int | None, typer.Option(help="Of the random maps. [default: 0]", min=0)] = None,
    settings: SetOption = None,
) -> None:
    """Start the server of a federation, and keep it running.

    The terms are fixed when the folder is new. Started again in the same folder, it goes on where it was.
    Public keys put into FOLDER/keys are admitted while it runs.
    """
    _flower()
    from apfl.flower.processes import Server, is_loopback, running, wait_until

    given = {
        "quorum": quorum, "min_cohort": min_cohort, "min_per_class": min_per_class, "wire": wire, "seed": seed,
        "keep_contributions": keep_contributions, "class_names": classes and tuple(classes.split(",")),
        "method": _settings(settings),
    }  # fmt: skip
    terms = _agree(folder, name, {key: value for key, value in given.items() if value not in (None, {})})
    where = Server(folder, host, port, secure=not is_loopback(host) if secure is None else secure)
    command = where.command()
    if not where.secure and not is_loopback(host):
        err.print("no encryption and no authentication on an address others can reach", style="yellow")
    where.write()
    with replacing(folder / "terms.json") as temporary:
        temporary.write_text(terms.to_json())
    if where.answers():
        raise InputError(f"something listens on port {port} already; stop it, or choose another --port")
    log = folder / "flower" / "superlink.log"
    _on_terminate()
    with running(command, where.environment, log) as process:
        wait_until(where.answers, process, 120, "the server", log)
        try:
            if where.secure:
                where.admit()
            names = ", ".join(sorted(where.registered)) or "none yet"
            told = f"TLS, sites admitted: {names}" if where.secure else "insecure"
            out.print(f"ready: {terms.federation} on {host}:{port} ({told}); log: {log}", soft_wrap=True)
            while process.poll() is None:
                time.sleep(2)
                for new in where.admit() if where.secure else []:
                    out.print(f"admitted {new}")
        except KeyboardInterrupt:
            out.print("stopped; start it again with the same folder to go on")
            return
    raise InputError(f"the server ended with code {process.returncode}; its log: {log}")


@app.command()
def join(
    server: Annotated[str, typer.Option(help="HOST:PORT of the server.")],
    data: Annotated[str, typer.Option(help="A file of features with labels (.npz, .csv, .parquet).")],
    name: Annotated[str, typer.Option(help="The site's name, as its key is called.")],
    folder: Annotated[
        Path | None, typer.Option(help="The site's own folder: model, log, what was sent. [default: sites/NAME]")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="The server's ca.crt.")] = None,
    key: Annotated[Path | None, typer.Option(help="This site's private key, NAME.key.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="No TLS; anyone on the way can read along.")] = False,
    terms: Annotated[
        Path | None, typer.Option(help="The server's terms.json: take part under these terms only.")
    ] = None,
    show: Annotated[
        bool, typer.Option("--show-what-leaves", help="List what would leave this site, and stop.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", help="Do not ask: what is listed may leave.")] = False,
    min_per_class: Annotated[
        int, typer.Option(help="Refuse a federation that shares classes with fewer rows.", min=1)
    ] = Terms.min_per_class,
    contribute: Annotated[
        bool, typer.Option("--contribute/--only-receive", help="Send statistics, or only take the primary.")
    ] = True,
    report: Annotated[
        bool, typer.Option("--report", help="Tell the server the accuracy on this site's test rows.")
    ] = False,
    test_column: Annotated[str | None, typer.Option(help="Column that is true for test rows.")] = None,
    test_fraction: Annotated[float, typer.Option(help="Share of the rows kept for testing.", min=0, max=0.9)] = 0.0,
    group_column: Annotated[
        str | None, typer.Option(help="Column whose equal entries (a patient's rows) stay together.")
    ] = None,
    predict: Annotated[
        Path | None, typer.Option(help="Rows to predict, here, when the server calls for predictions (.npz).")
    ] = None,
    patience: Annotated[float, typer.Option(help="Seconds to try while the server turns the key away.")] = 90.0,
) -> None:
    """Take part in a federation with the rows of one file.

    Says first, in numbers and words, what leaves this machine, and asks. Rows never leave; the personal model is
    written to FOLDER/FEDERATION/NAME/model.safetensors, and `apfl predict` uses it offline.
    """
    from apfl.flower.processes import Site as Connection
    from apfl.flower.processes import is_loopback, split_address

    address, _ = split_address(server)
    if ca is None and not insecure and not is_loopback(address):
        raise InputError(f"{server} is another machine: give --ca ca.crt and --key {name}.key, or accept --insecure")
    for path in (ca, key, terms, predict):
        if path is not None and not path.is_file():
            raise InputError(f"there is no file {path}")
    folder = folder or Path("sites") / name
    split = {"test_column": test_column, "test_fraction": test_fraction, "group_column": group_column}
    site = Site.from_file(folder, name, data, **split)  # type: ignore[arg-type]
    agreement = terms.read_bytes() if terms else Terms("unknown", min_per_class=min_per_class).to_json().encode()
    err.print(f"What leaves {name}" + ("" if terms else ", under the usual terms (give --terms to be exact)") + ":")
    for line in site.what_leaves(agreement).lines() if contribute else ["nothing: this site only receives"]:
        err.print(f"  - {line}", markup=False, highlight=False, soft_wrap=True)
    if show:
        return
    _flower()
    from apfl.flower.join import stay_connected

    if not yes and not typer.confirm("May this leave?", err=True):
        raise InputError("nothing was sent")
    rows = str(Path(data).absolute()) if Path(data).exists() else data
    config: dict[str, Any] = {
        "min-per-class": min_per_class, "contribute": contribute, "report": report, "test-fraction": test_fraction,
        "test-column": test_column or "", "group-column": group_column or "",
        "terms": str(terms.absolute()) if terms else "", "predict": str(predict.absolute()) if predict else "",
    }  # fmt: skip
    connection = Connection(folder, name, rows, server, None if insecure else ca, key, config)
    _on_terminate()
    try:
        stay_connected(connection, folder / "supernode.log", lambda line: err.print(f"{name}: {line}"), patience)
    except KeyboardInterrupt:
        err.print(f"{name}: disconnected; what it contributed counts until `apfl federate leave`")


@app.command()
def run(
    folder: FolderArgument,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for sites in each stage.", min=1)] = 600.0,
    linger: Annotated[float, typer.Option(help="Seconds to stay for late sites when all is done.", min=0)] = 0.0,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Ask sites for their accuracy (those with --report).")
    ] = False,
    predict: Annotated[
        bool, typer.Option("--predict", help="Have sites predict their own rows, at their place.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask the connected sites for what the server lacks, and publish. Run it again whenever sites have come.

    Ctrl-C stops looking on; the run goes on at the server. Nothing that has arrived is asked for again.
    """
    from apfl.flower.follow import follow, start_run

    run_id = start_run(_server(folder), deadline=deadline, linger=linger, evaluate=evaluate, predict=predict)
    try:
        last = follow(folder, run_id, lambda event: _tell(event, as_json))
    except KeyboardInterrupt:
        err.print(f"run {run_id} goes on at the server; look on with: apfl federate status {folder} --watch")
        raise typer.Exit(130) from None
    if not last["published"]:
        who = ", ".join(last["members"]) or "none"
        raise InputError(
            f"nothing published: quorum {last['quorum']}, contributed: {who}; run again when more are there"
        )
    if not as_json:
        out.print(status_view(status_of(folder)))


@app.command()
def status(
    folder: FolderArgument,
    watch: Annotated[bool, typer.Option("--watch", help="Keep looking, until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Who joined, answered and is late; bytes; membership; accuracy where sites report it."""
    view = _view(folder, as_json, recent=watch)
    if not watch:
        out.print(view(), soft_wrap=as_json)
        return
    try:
        with Live(view(), console=out, refresh_per_second=2, screen=False) as live:
            while True:
                time.sleep(1)
                live.update(view())
    except KeyboardInterrupt:
        return


@app.command()
def leave(
    folder: FolderArgument,
    site: Annotated[str, typer.Argument(help="The site that leaves.")],
    contribution: Annotated[
        Path | None,
        typer.Option(help="The bytes it sent (sent-HASH.safetensors in its folder), if only sums are kept."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Take a site out: everything is then as if it had never joined, and the evidence is printed."""
    _take_out(folder, site, contribution, False, as_json)


@app.command()
def forget(
    folder: FolderArgument,
    site: Annotated[str, typer.Argument(help="The site to forget.")],
    contribution: Annotated[
        Path | None,
        typer.Option(help="The bytes it sent (sent-HASH.safetensors in its folder), if only sums are kept."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """`leave`, and erase the site's name too."""
    _take_out(folder, site, contribution, True, as_json)


@app.command()
def result(
    folder: FolderArgument,
    target: Annotated[Path | None, typer.Option("--out", help="Write the primary as a model file.")] = None,
    as_json: JsonOption = False,
) -> None:
    """The published primary: its members, its settings, accuracies; with --out a model that `apfl predict` takes."""
    from apfl.deploy.result import primary_model, summary

    told = summary(folder)
    if as_json:
        out.print(json.dumps(told), soft_wrap=True, highlight=False, markup=False)
    else:
        for key, value in told.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            out.print(f"{key:<12} {shown}", soft_wrap=True, highlight=False, markup=False)
    if target is not None:
        primary_model(folder, target)
        err.print(f"wrote {target}; without a site's refinement it is what a new site starts from")


@app.command()
def simulate(
    data: Annotated[str, typer.Option(help="As for `apfl run`: 'digits' or a file of features.")] = "digits",
    clients: Annotated[int, typer.Option(help="Number of sites.", min=2)] = 10,
    alpha: Annotated[float, typer.Option(help="Dirichlet concentration; smaller is more heterogeneous.")] = 0.5,
    partition: Annotated[str, typer.Option(help="As for `apfl run`.")] = "dirichlet",
    seed: Annotated[int, typer.Option(help="Of the partition and of the maps.", min=0)] = 0,
    folder: Annotated[Path | None, typer.Option("--out", help="[default: runs/federation-TIME]")] = None,
    settings: SetOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run the whole federation on this machine, in Flower's simulation engine."""
    _flower()
    from apfl.experiment import Protocol
    from apfl.flower.simulate import simulate as simulated

    folder = folder or Path("runs") / f"federation-{time.strftime('%Y%m%d-%H%M%S')}"
    protocol = Protocol(partition, clients, alpha)
    terms = Terms.checked({"federation": "simulated", "seed": seed, "quorum": clients, "method": _settings(settings)})
    simulated(folder, data, protocol, seed, terms, as_json=as_json)
    out.print(_view(folder, as_json)(), soft_wrap=as_json)
    if not as_json:
        out.print(f"models: {folder}/sites/*/simulated/*/model.safetensors", soft_wrap=True)


def _take_out(folder: Path, site: str, contribution: Path | None, forget: bool, as_json: bool) -> None:
    data = None
    if contribution is not None:
        if not contribution.is_file():
            raise InputError(f"there is no file {contribution}")
        data = contribution.read_bytes()
    with Coordinator(folder, wait=10) as coordinator:
        kept = coordinator.draft.keep_contributions or data is not None
        if kept:
            evidence = (coordinator.forget if forget else coordinator.leave)(site, data).to_json()
    if not kept:  # the site itself must send once more what it sent
        from apfl.flower.follow import follow, start_run

        run_id = start_run(_server(folder), leave=site, forget=forget)
        evidence = follow(folder, run_id, lambda event: None)["evidence"]
    _dismiss(folder, site)
    if as_json:
        out.print(json.dumps(evidence), soft_wrap=True, highlight=False, markup=False)
        return
    from apfl.deploy import Evidence

    for line in Evidence(**evidence).lines():
        out.print(line, soft_wrap=True, highlight=False, markup=False)
    if evidence["publication"] is not None:
        out.print(f"sites refit with the next run: apfl federate run {folder}", soft_wrap=True)


def _dismiss(folder: Path, site: str) -> None:
    """The site's key no longer opens the door."""
    public = folder / "keys" / f"{site}.pub"
    if public.exists():
        public.replace(public.with_suffix(".pub.left"))
        server = _server(folder)
        if server.answers():
            server.dismiss(site)


def _agree(folder: Path, name: str | None, given: dict[str, Any]) -> Terms:
    """The federation's terms: those of the folder, or new ones; terms that contradict the folder's are refused."""
    if not (folder / "ledger.sqlite").exists():
        named = name or re.sub(r"[^A-Za-z0-9._-]", "-", folder.absolute().name)
        folder.mkdir(parents=True, exist_ok=True)
        with Coordinator(folder, Terms.checked({"federation": named, **given})) as coordinator:
            return coordinator.draft
    with Coordinator(folder, wait=10) as coordinator:
        draft = coordinator.draft
    wanted = json.loads(draft.to_json())
    wanted["method"] |= given.pop("method", {})
    asked = Terms.checked(wanted | given | ({"federation": name} if name else {}))
    if asked != draft:
        raise InputError(f"{folder} was agreed on other terms (see {folder / 'terms.json'}); leave the options away")
    return draft


def _settings(assignments: list[str] | None) -> dict[str, str]:
    found = {}
    for assignment in assignments or []:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise InputError(f"--set {assignment!r} given; expected KEY=VALUE, for example d_primary=1024")
        found[key] = value
    return found


def _server(folder: Path) -> Any:
    _flower()
    from apfl.flower.processes import Server

    return Server.read(folder)


def _tell(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    from apfl.flower.events import in_words

    err.print(in_words(event), markup=False, highlight=False, soft_wrap=True)


def _view(folder: Path, as_json: bool, recent: bool = False) -> Callable[[], Any]:
    from apfl.flower.events import Events, in_words

    def view() -> Any:
        found = status_of(folder)
        if as_json:
            return json.dumps(found)
        expected = [path.stem for path in (folder / "keys").glob("*.pub")]
        lines = [in_words(event) for _, event in Events.read(folder / "events.jsonl")][-N_LINES:] if recent else []
        return status_view(found, expected, lines)

    return view


def _on_terminate() -> None:
    """SIGTERM, which service managers send, ends as Ctrl-C does: children first."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)


def _flower() -> None:
    optional("flwr", "flower")
