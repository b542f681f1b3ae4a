"""``apfl federate leave`` and ``forget``: a site is taken out, exactly, and the evidence is printed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.federation import FolderArgument, JsonOption, need_flower
from apfl.cli.progress import out
from apfl.errors import InputError
from apfl.federate.ledger import Ledger

__all__ = ["forget", "leave", "server_of"]

REDRAWN = (
    "the landmarks, and all that was made on them, are deleted: the next run asks the others again and draws new ones "
    "from their moments (apfl federate run {}). Until then there is no primary"
)
SiteArgument = Annotated[str, typer.Argument(help="Site to take out.")]
ContributionOption = Annotated[
    Path | None,
    typer.Option(help="File that the site sent (sent-HASH.safetensors in its folder), if the server keeps only sums."),
]

NewLandmarksOption = Annotated[
    bool,
    typer.Option(
        "--new-landmarks",
        help="Draw landmarks anew from those who remain, who are asked again. \\[default: they stay, as in the terms]",
    ),
]


def leave(
    folder: FolderArgument,
    site: SiteArgument,
    contribution: ContributionOption = None,
    new_landmarks: NewLandmarksOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take a site out, exactly as if it had never joined, and print the evidence."""
    _take_out(folder, site, contribution, False, new_landmarks, as_json)


def forget(
    folder: FolderArgument,
    site: SiteArgument,
    contribution: ContributionOption = None,
    new_landmarks: NewLandmarksOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take a site out as `leave` does, and erase its name too."""
    _take_out(folder, site, contribution, True, new_landmarks, as_json)


def _take_out(
    folder: Path, site: str, contribution: Path | None, forget: bool, new_landmarks: bool, as_json: bool
) -> None:
    data = None if contribution is None else _sent(contribution)
    _check_site(folder, site)
    from apfl.federate import Coordinator  # here: what was given wrongly is said without torch

    with Coordinator(folder, wait=10) as coordinator:
        masked = coordinator.draft.masked
        if new_landmarks:
            coordinator.check_redraw()
            if site in coordinator.ledger.gone():  # a former call was interrupted, or did not ask for new landmarks
                coordinator.redraw()
                out.print(REDRAWN.format(folder), soft_wrap=True, highlight=False)
                return
        kept = masked or coordinator.draft.keep_contributions or data is not None
        if kept:
            evidence = (coordinator.forget if forget else coordinator.leave)(site, data).to_json()
    if not kept:  # the site itself must send once more what it sent
        from apfl.federate.flower.follow import follow, start_run

        run_id = start_run(server_of(folder), leave=site, forget=forget)
        evidence = follow(folder, run_id, lambda event: None)["evidence"]
    _dismiss(folder, site, forget)
    if new_landmarks:
        with Coordinator(folder, wait=10) as coordinator:
            coordinator.redraw()
        evidence |= {"publication": None, "difference": None, "residual": None, "remains": []}
    renewed = _renew_rosters(folder, site) if masked else []
    if as_json:
        out.print(json.dumps(evidence), soft_wrap=True, highlight=False)
    else:
        _print_evidence(folder, evidence, renewed, new_landmarks)


def _sent(contribution: Path) -> bytes:
    """What the site sent, from its own file."""
    if not contribution.is_file():
        raise InputError(f"there is no file {contribution}")
    return contribution.read_bytes()


def _print_evidence(folder: Path, evidence: dict[str, Any], renewed: Iterable[str], new_landmarks: bool) -> None:
    """What was done, how that is known, and what comes next."""
    from apfl.federate import Evidence

    for line in (*Evidence(**evidence).lines(), *renewed):
        out.print(line, soft_wrap=True, highlight=False)
    if new_landmarks:
        out.print(REDRAWN.format(folder), soft_wrap=True, highlight=False)
    elif evidence["publication"] is not None:
        out.print(f"sites refit with the next run: apfl federate run {folder}", soft_wrap=True)


def _renew_rosters(folder: Path, site: str) -> list[str]:
    """The site's roster without it, for the others to confirm; what to do with it."""
    from apfl.federate.masked.rosters import read_roster, write_roster
    from apfl.federate.secure import Roster

    told = []
    for path in sorted((folder / "rosters").glob("*.json")):
        keys = dict(read_roster(path).keys)
        if keys.pop(site, None) is None:
            continue
        path.rename(path.with_suffix(".left"))
        if len(keys) >= 2:
            write_roster(path, made := Roster(keys))
            told.append(
                f"the others must sum up again: give {path} to {', '.join(made.names)}, compare the fingerprint "
                f"{made.fingerprint}, join with it, and run: apfl federate run {folder}"
            )
    return told


def _check_site(folder: Path, site: str) -> None:
    """Refuse a site that is none of the federation's."""
    ledger = Ledger(folder, writer=False)
    try:
        ledger.known(site)
    finally:
        ledger.close()


def _dismiss(folder: Path, site: str, forget: bool) -> None:
    """The site's key no longer opens the door; the server knows by it whom to tell that it has left."""
    public = folder / "keys" / f"{site}.pub"
    left = public.with_suffix(".pub.left")
    if public.exists():
        public.replace(left)
        server_of(folder).dismiss(site)
    if forget:  # the file bears its name
        left.unlink(missing_ok=True)


def server_of(folder: Path) -> Any:
    """The server that was started in a folder."""
    need_flower()
    from apfl.federate.flower.processes import Server

    return Server.read(folder)
