"""``apfl federate keys``: certificates of the server and key pairs of sites."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from apfl.cli.federation import FolderArgument
from apfl.errors import InputError, optional

__all__ = ["keys", "roster"]


def keys(
    folder: Annotated[Path, typer.Argument(help="Folder to write to; the server reads keys/ in its own folder.")],
    host: Annotated[
        list[str] | None, typer.Option(help="Name or address by which sites reach the server. Repeatable.")
    ] = None,
    site: Annotated[list[str] | None, typer.Option(help="Make a key pair for this site. Repeatable.")] = None,
    masked: Annotated[
        bool, typer.Option("--masked", help="Make each site's identity for masked sums, too; do this at the site.")
    ] = False,
    days: Annotated[int, typer.Option(help="Days for which the server's certificate is valid.", min=1)] = 825,
) -> None:
    """Make certificates for the server (--host) and key pairs for sites (--site).

    A site can make its own pair and send only NAME.pub. Whoever holds NAME.key can act as that site.
    """
    optional("flwr", "flower")
    from apfl.federate.flower.keys import make_certificates, make_site_key

    if not (host or site):
        raise InputError("nothing to make: give --host NAME for the server's certificate, --site NAME for key pairs")
    if host:
        made = make_certificates(folder, host, days)
        typer.echo(f"{made.certificate} for {', '.join(host)}; sites need {made.authority}")
    for name in site or []:
        private, public = make_site_key(folder, name)
        typer.echo(f"{private} goes to {name} and nowhere else; {public} stays with the server")
        if masked:
            from apfl.federate.masked.rosters import make_identity

            identity, member = make_identity(folder, name)
            typer.echo(f"{identity} stays at {name}, or the server could act as a member; {member} goes to the server")


def roster(folder: FolderArgument) -> None:
    """Make a roster of the sites whose NAME.member lies in FOLDER/keys and that are on no roster yet.

    Sites that come later make a roster of their own. Send the file to each of its sites, and the fingerprint by
    another way: every site compares it before it joins.
    """
    optional("flwr", "flower")
    from apfl.federate.masked.rosters import collect, rosters_of, write_roster

    before = rosters_of(folder)
    made = collect(folder / "keys", {name for each in before for name in each.names})
    path = folder / "rosters" / f"{len(before) + 1:03d}.json"
    write_roster(path, made)
    typer.echo(f"{path}: {', '.join(made.names)}; {made.threshold} of {len(made)} must answer")
    typer.echo(f"fingerprint {made.fingerprint}")
