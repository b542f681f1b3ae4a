"""``apfl federate``: a federation between machines, or all of one on this machine."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.live import Live

from apfl.cli.leave import FolderArgument, forget, leave, server_of
from apfl.cli.progress import err, out
from apfl.cli.site import (
    JsonOption,
    SetOption,
    end_as_interrupted,
    join,
    keys,
    method_settings,
    need_flower,
    refuse_predict,
    simulate,
    status_of_folder,
)
from apfl.errors import InputError
from apfl.federate import Coordinator, Terms
from apfl.federate.flower.bundle import DEADLINE
from apfl.federate.flower.processes import Server, is_loopback, running, wait_until
from apfl.federate.status import primary_model, status_of, summary
from apfl.files import replacing
from apfl.report.terminal import status_view

__all__ = ["app"]

app = typer.Typer(
    help="Run a federation between machines, on Flower; or simulate one on this machine.",
    no_args_is_help=True,
    rich_markup_mode="rich",
)

app.command()(keys)


@app.command()
def server(
    folder: FolderArgument,
    name: Annotated[str | None, typer.Option(help="Name of the federation. \\[default: the folder's]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that sites connect to.", min=1, max=65535)] = Server.port,
    secure: Annotated[
        bool | None,
        typer.Option("--secure/--insecure", help="Require TLS and known keys. \\[default: on, except on loopback]"),
    ] = None,
    quorum: Annotated[int | None, typer.Option(help="Fewest sites in a publication. \\[default: 2]")] = None,
    min_cohort: Annotated[
        int | None, typer.Option(help="Fewest late sites to fold in together. \\[default: 1]")
    ] = None,
    min_per_class: Annotated[
        int | None, typer.Option(help="Rows of a class below which a site withholds it. \\[default: 2]")
    ] = None,
    wire: Annotated[
        str | None, typer.Option(help="Precision of uploads: float64 or float32. \\[default: float64]")
    ] = None,
    keep_contributions: Annotated[
        bool | None,
        typer.Option(
            "--keep-contributions/--no-keep-contributions",
            help="Keep every contribution, or only their sum. \\[default: keep]",
        ),
    ] = None,
    classes: Annotated[
        str | None, typer.Option(help="Class names, separated by commas. \\[default: those of the sites]")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed of the random maps. \\[default: 0]", min=0)] = None,
    settings: SetOption = None,
) -> None:
    """Start the server of a federation and keep it running.

    The options fix the terms of a new folder. Started again in the same folder,
    the server resumes. It admits public keys that are put into FOLDER/keys
    while it runs.
    """
    need_flower()
    given = {
        "quorum": quorum, "min_cohort": min_cohort, "min_per_class": min_per_class, "wire": wire, "seed": seed,
        "keep_contributions": keep_contributions, "class_names": classes and tuple(classes.split(",")),
        "method": method_settings(settings),
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
    end_as_interrupted()
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
                    out.print(f"admitted {new}", soft_wrap=True)
        except KeyboardInterrupt:
            out.print("stopped; start the server again with the same folder to resume")
            return
    raise InputError(f"the server ended with code {process.returncode}; its log: {log}")


app.command()(join)


@app.command()
def run(
    folder: FolderArgument,
    deadline: Annotated[float, typer.Option(help="Seconds to wait for sites in each stage.", min=1)] = DEADLINE,
    linger: Annotated[float, typer.Option(help="Seconds to wait for late sites at the end.", min=0)] = 0.0,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="Ask the sites that joined with --report for their accuracy.")
    ] = False,
    predict: Annotated[bool, typer.Option("--predict", hidden=True)] = False,
    as_json: JsonOption = False,
) -> None:
    """Ask connected sites for what the server lacks, and publish. Run it again when more sites have connected.

    Ctrl-C stops the display; the run continues at the server. The server never requests the same data twice.
    """
    refuse_predict(predict)
    from apfl.federate.flower.follow import follow, start_run

    run_id = start_run(server_of(folder), deadline=deadline, linger=linger, evaluate=evaluate)
    try:
        last = follow(folder, run_id, lambda event: _tell(event, as_json))
    except KeyboardInterrupt:
        err.print(
            f"run {run_id} continues at the server; watch it with: apfl federate status {folder} --watch",
            soft_wrap=True,
        )
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
    watch: Annotated[bool, typer.Option("--watch", help="Refresh until Ctrl-C.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show who joined, answered and is late; bytes, membership, and accuracies that sites report."""
    view = status_of_folder(folder, as_json, recent=watch)
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


app.command()(leave)
app.command()(forget)


@app.command()
def result(
    folder: FolderArgument,
    target: Annotated[Path | None, typer.Option("--out", help="Model file to write the primary to.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the published primary: members, settings, accuracies. With --out, write it for `apfl predict`."""
    told = summary(folder)
    if as_json:
        out.print(json.dumps(told), soft_wrap=True, highlight=False)
    else:
        for key, value in told.items():
            shown = ", ".join(map(str, value)) if isinstance(value, list) else value
            out.print(f"{key:<12} {shown}", soft_wrap=True, highlight=False)
    if target is not None:
        primary_model(folder, target)
        err.print(f"wrote {target}; without a site's refinement it is what a new site starts from", soft_wrap=True)


app.command()(simulate)


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
        raise InputError(f"{folder} has other terms (see {folder / 'terms.json'}); omit the options")
    return draft


def _tell(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    from apfl.federate.flower.events import in_words

    err.print(in_words(event), highlight=False, soft_wrap=True)
