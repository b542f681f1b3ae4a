"""``apfl federate``: a federation between machines, or all of one on this machine."""

from __future__ import annotations

import json
import os
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.live import Live

from apfl.cli.federation import (
    FolderArgument,
    JsonOption,
    SetOption,
    method_settings,
    need_flower,
    noise_settings,
    refuse_predict,
    status_of_folder,
)
from apfl.cli.leave import server_of
from apfl.cli.progress import end_as_interrupted, err, out
from apfl.data.source import TARGET_NAMES
from apfl.errors import InputError, printable, unknown
from apfl.federate.flower.bundle import DEADLINE
from apfl.federate.flower.peers import knows_users
from apfl.federate.flower.processes import Server, is_loopback, running, wait_until
from apfl.federate.flower.telling import Telling
from apfl.federate.ledger import Ledger
from apfl.federate.status import status_of, summary
from apfl.files import make_private, replacing
from apfl.report.status import status_view

if TYPE_CHECKING:
    from apfl.federate import Terms

__all__ = ["result", "run", "server", "status"]

OF_COLUMNS = {"quorum": 3, "min_cohort": 2}  # the fewest there may be: members are sent everyone's sums
NEEDED = {"--classes": "class_names", "--n-features": "n_features"}  # by masked terms

# What apfl and Flower write into the server's folder; whatever else lies there stays as it is.
OWN_FILES = ("blobs", "keys", "flower", "ledger*", "events.jsonl", "terms.json", "signing.*", "lock*")


def server(
    folder: FolderArgument,
    name: Annotated[str | None, typer.Option(help="Name of the federation. \\[default: the folder's]")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port that sites connect to.", min=1, max=65535)] = Server.port,
    secure: Annotated[
        bool | None,
        typer.Option("--secure/--insecure", help="Require TLS and known keys. \\[default: on, except on loopback]"),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            help="What is predicted: classification, regression (columns of numbers) or multilabel (columns of 0 and "
            "1); of columns --classes has the names, and --plain is needed. \\[default: classification]"
        ),
    ] = None,
    quorum: Annotated[
        int | None, typer.Option(help="Fewest sites in a publication. \\[default: 2; with columns as --target 3]")
    ] = None,
    min_cohort: Annotated[
        int | None,
        typer.Option(help="Fewest late sites to fold in together. \\[default: 1; with columns as --target 2]"),
    ] = None,
    min_per_class: Annotated[
        int | None, typer.Option(help="Rows of a class below which a site withholds it. \\[default: 2]")
    ] = None,
    max_rows: Annotated[
        int | None, typer.Option(help="Most rows that one site contributes. \\[default: as --max-share]")
    ] = None,
    max_share: Annotated[
        float | None,
        typer.Option(help="Largest share of all rows that one site contributes, of three or more. \\[default: 0.5]"),
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
        str | None,
        typer.Option(
            help="Class names, or those of the columns of --target, separated by commas, or a file with one on each "
            "line. \\[default: with --plain those of the sites]"
        ),
    ] = None,
    masked: Annotated[
        bool | None,
        typer.Option(
            "--masked/--plain",
            help="See only sums over sites (needs --classes, --n-features and a roster), or what each site sends, from "
            "which its rows can often be recovered. \\[default: masked if secure]",
        ),
    ] = None,
    n_features: Annotated[
        int | None,
        typer.Option(help="Number of features of a row. \\[default: with --plain that of the sites]", min=1),
    ] = None,
    epsilon: Annotated[
        float | None,
        typer.Option(
            help="Publish noisy sums only, so that one row is hidden up to this epsilon; needs --classes, --n-features "
            "and --max-rows. \\[default: no noise]",
            min=0,
        ),
    ] = None,
    delta: Annotated[
        float | None, typer.Option(help="Delta beside --epsilon; far below 1 over all rows. \\[default: 1e-5]")
    ] = None,
    colluders: Annotated[
        int | None,
        typer.Option(help="Sites whose shares of the noise the server may know, under masks. \\[default: 0]", min=0),
    ] = None,
    releases: Annotated[
        int | None,
        typer.Option(
            help="Noisy sums that --epsilon is for: the first, and one for each join, leave and late cohort. "
            "\\[default: 1]",
            min=1,
        ),
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
    os.umask(0o077)
    where = Server(folder, host, port, secure=not is_loopback(host) if secure is None else secure)
    given = {
        "quorum": quorum, "min_cohort": min_cohort, "min_per_class": min_per_class, "wire": wire, "seed": seed,
        "keep_contributions": keep_contributions, "class_names": classes and _names(classes),
        "max_rows": max_rows, "max_share": max_share, "masked": masked, "n_features": n_features,
        "releases": releases, "target": target,
        "method": noise_settings(epsilon, delta, colluders) | method_settings(settings),
    }  # fmt: skip
    chosen = {key: value for key, value in given.items() if value not in (None, {})}
    terms = _agreement(folder, name, chosen, masked=where.secure)
    if json.loads(terms).get("masked") and not where.secure:
        raise InputError("masked terms and no keys given: sites of a roster are known by their keys. Give --secure")
    command = where.command()
    _warn_of_strangers(where)
    lock = where.hold()
    for kept in (name for pattern in OWN_FILES for name in folder.resolve().glob(pattern)):
        make_private(kept)  # also what an earlier version put there
    where.write()
    key = _signing_fingerprint(folder)
    with replacing(folder / "terms.json") as temporary:
        temporary.write_text(terms)
    if where.answers():
        raise InputError(f"something listens on port {port} already; stop it, or choose another --port")
    log = folder / "flower" / "superlink.log"
    end_as_interrupted()
    telling = Telling(log)
    with lock, running(command, where.environment, log, lock=lock) as process:
        wait_until(where.answers, process, 120, "the server", log)
        try:
            problem = _admit(where, "")
            _tell_ready(where, json.loads(terms), log, key)
            while process.poll() is None:
                time.sleep(2)
                for line in telling.lines():
                    err.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
                problem = _admit(where, problem)
        except KeyboardInterrupt:
            out.print("stopped; start the server again with the same folder to resume")
            return
    raise InputError(f"the server ended with code {process.returncode}; its log: {log}")


def _names(classes: str) -> tuple[str, ...]:
    """Class names from a file with one on each line, or separated by commas."""
    path = Path(classes)
    if "," in classes or not path.is_file():
        return tuple(classes.split(","))
    try:
        return tuple(line for line in path.read_text().splitlines() if line.strip())
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} cannot be read ({error}); give a text file with one class name on each line"
        ) from error


def _tell_ready(where: Server, terms: dict[str, Any], log: Path, key: str) -> None:
    names = ", ".join(sorted(where.registered)) or "none yet"
    security = f"TLS, sites admitted: {names}" if where.secure else "insecure"
    out.print(_what_it_sees(where, terms), soft_wrap=True, highlight=False)
    out.print(f"ready: {terms['federation']} on {where.host}:{where.port} ({security}); log: {log}", soft_wrap=True)
    out.print(f"instructions are signed with key {key}", soft_wrap=True)


def _what_it_sees(where: Server, terms: dict[str, Any]) -> str:
    """What this server sees of a site, in one line."""
    if not terms.get("masked"):
        return (
            "plain: this server sees what each site sends, from which its rows can often be recovered; a server with "
            "--masked sees sums over sites only"
        )
    lacking = "" if any((where.folder / "rosters").glob("*.json")) else f". First: apfl federate roster {where.folder}"
    return f"masked: this server sees sums over three sites or more, and nothing of a single one{lacking}"


def _warn_of_strangers(where: Server) -> None:
    """Say who else could take part or start a run."""
    if not where.secure and not is_loopback(where.host):
        err.print("no encryption and no authentication on an address others can reach", style="yellow")
    if not knows_users():
        err.print(
            "this system does not say which user connects: any user of this machine could start a run", style="yellow"
        )


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


def result(
    folder: FolderArgument,
    target: Annotated[Path | None, typer.Option("--out", help="Model file to write the primary to.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show the published primary: members, settings, accuracies. With --out, write it for `apfl predict`."""
    facts = summary(folder)
    if as_json:
        out.print(json.dumps(facts), soft_wrap=True, highlight=False)
    else:
        for key, value in facts.items():
            shown = ", ".join(map(printable, value)) if isinstance(value, list) else printable(value)
            out.print(f"{key:<12} {shown}", soft_wrap=True, highlight=False)
    if target is not None:
        from apfl.federate.primary import primary_model

        primary_model(folder, target)
        make_private(target)
        err.print(f"wrote {target}; without a site's refinement it is what a new site starts from", soft_wrap=True)


def _agreement(folder: Path, name: str | None, given: dict[str, Any], *, masked: bool = False) -> str:
    """The terms as JSON. Those of a folder that is started again are read without torch, which takes seconds."""
    if name or given or not (folder / "ledger.sqlite").exists():
        return _agree(folder, name, given, masked=masked).to_json()
    ledger = Ledger(folder, wait=10)
    try:
        return ledger.get("draft") or ""
    finally:
        ledger.close()


def _new_terms(given: dict[str, Any], masked: bool) -> dict[str, Any]:
    """What was given, with the defaults of a new folder: masks between machines, which need what no site may say."""
    if given.get("target", "classification") != "classification":
        _check_plain(given["target"], masked=given.get("masked", masked))
        given = {**OF_COLUMNS, **given}
    if not given.setdefault("masked", masked):
        return given
    lacking = [option for option, key in NEEDED.items() if key not in given]
    if lacking:
        raise InputError(
            f"no {' and '.join(lacking)} given: a server between machines sees sums over sites only, so no site tells "
            "it what classes and features there are. With --plain it sees what each site sends, from which its rows "
            "can often be recovered"
        )
    return given | {"method": {"map": "landmarks", **given.get("method", {})}}


def _check_plain(target: str, *, masked: bool) -> None:
    """Refuse masks for targets that have no agreed range, and kinds of targets that there are not."""
    if target not in TARGET_NAMES:
        raise unknown("target", target, TARGET_NAMES)
    if masked:
        raise InputError(
            f"--target {target} given without --plain: masks need integers of an agreed range, which targets do not "
            "have. With --plain the server sees what each site sends, from which its rows can often be recovered"
        )


def _agree(folder: Path, name: str | None, given: dict[str, Any], *, masked: bool = False) -> Terms:
    """The federation's terms: those of the folder, or new ones; terms that contradict the folder's are refused."""
    if not (folder / "ledger.sqlite").exists():
        given = _new_terms(given, masked)
    from apfl.federate import Coordinator, Terms, public
    from apfl.federate.terms import HALF, LATER_SETTINGS

    if not (folder / "ledger.sqlite").exists():
        named = name or re.sub(r"[^A-Za-z0-9._-]", "-", folder.absolute().name)
        folder.mkdir(parents=True, exist_ok=True)
        share = {} if given["masked"] else {"max_share": HALF}
        with Coordinator(folder, Terms.checked({"federation": named, **share, **given})) as coordinator:
            return coordinator.draft
    with Coordinator(folder, wait=10) as coordinator:
        draft = coordinator.draft
    wanted = json.loads(draft.to_json())
    if "landmarks" in given.get("method", {}):  # a file that is given again is named again
        wanted |= {"public_sha256": None, "public_rows": None}
    wanted["method"] = LATER_SETTINGS | wanted["method"] | given.pop("method", {})
    asked, _ = public.named(Terms.checked(wanted | given | ({"federation": name} if name else {})))
    if asked != draft:
        raise InputError(f"{folder} has other terms (see {folder / 'terms.json'}); omit the options")
    return draft


def _admit(server: Server, problem: str) -> str:
    """Admit by the keys in the folder. If that fails, on a full disk say, print the problem once and go on."""
    if not server.secure:  # there are no keys
        return ""
    try:
        for change in server.admit():
            out.print(change, soft_wrap=True, highlight=False)
    except InputError as error:
        if str(error) != problem:
            err.print(str(error), style="yellow", markup=False, soft_wrap=True)
        return str(error)
    return ""


def _signing_fingerprint(folder: Path) -> str:
    """The fingerprint of the key that signs instructions, which is made if there is none yet."""
    from apfl.federate.flower.keys import signing_key
    from apfl.federate.instructions import fingerprint_of

    return fingerprint_of(signing_key(folder)[1])


def _tell(event: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(event), flush=True)
        return
    from apfl.federate.flower.events import in_words

    err.print(in_words(event), highlight=False, soft_wrap=True)
