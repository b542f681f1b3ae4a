"""``apfl federate leave`` and ``forget``: a site is taken out, exactly, and the evidence is printed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.progress import out
from apfl.cli.site import JsonOption, need_flower
from apfl.errors import InputError
from apfl.federate import Coordinator, Evidence

__all__ = ["FolderArgument", "forget", "leave", "server_of"]

FolderArgument = Annotated[Path, typer.Argument(help="Folder of the federation on the server.")]
SiteArgument = Annotated[str, typer.Argument(help="Site to take out.")]
ContributionOption = Annotated[
    Path | None,
    typer.Option(help="File that the site sent (sent-HASH.safetensors in its folder), if the server keeps only sums."),
]


def leave(
    folder: FolderArgument,
    site: SiteArgument,
    contribution: ContributionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a site out, exactly as if it had never joined, and print the evidence."""
    _take_out(folder, site, contribution, False, as_json)


def forget(
    folder: FolderArgument,
    site: SiteArgument,
    contribution: ContributionOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a site out as `leave` does, and erase its name too."""
    _take_out(folder, site, contribution, True, as_json)


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
        from apfl.federate.flower.follow import follow, start_run

        run_id = start_run(server_of(folder), leave=site, forget=forget)
        evidence = follow(folder, run_id, lambda event: None)["evidence"]
    _dismiss(folder, site)
    if as_json:
        out.print(json.dumps(evidence), soft_wrap=True, highlight=False)
        return
    for line in Evidence(**evidence).lines():
        out.print(line, soft_wrap=True, highlight=False)
    if evidence["publication"] is not None:
        out.print(f"sites refit with the next run: apfl federate run {folder}", soft_wrap=True)


def _dismiss(folder: Path, site: str) -> None:
    """The site's key no longer opens the door."""
    public = folder / "keys" / f"{site}.pub"
    if public.exists():
        public.replace(public.with_suffix(".pub.left"))
        server = server_of(folder)
        if server.answers():
            server.dismiss(site)


def server_of(folder: Path) -> Any:
    """The server that was started in a folder."""
    need_flower()
    from apfl.federate.flower.processes import Server

    return Server.read(folder)
