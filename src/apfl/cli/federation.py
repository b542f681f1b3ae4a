"""What the commands of ``apfl federate`` share."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.options import assignment
from apfl.errors import InputError, optional
from apfl.federate.status import status_of
from apfl.report.status import status_view

__all__ = [
    "FolderArgument", "JsonOption", "SetOption", "method_settings", "need_flower", "noise_settings", "refuse_predict",
    "status_of_folder",
]  # fmt: skip

FolderArgument = Annotated[Path, typer.Argument(help="Folder of the federation on the server.")]
N_LINES = 8  # of what happened last, below a status that is watched

JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON lines, for other programs.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", help="Change a setting of the method: KEY=VALUE (see `apfl methods apfl`). Repeatable."),
]


def method_settings(assignments: list[str] | None) -> dict[str, str]:
    """What --set says."""
    return dict(assignment(text, "d_primary=1024") for text in assignments or [])


def noise_settings(epsilon: float | None, delta: float | None, colluders: int | None) -> dict[str, Any]:
    """What the options of noise say of the method: a landmark map that no data decide."""
    given = {"epsilon": epsilon, "delta": delta, "colluders": colluders}
    stated = {name: value for name, value in given.items() if value is not None}
    if stated and epsilon is None:
        raise InputError(f"--{next(iter(stated))} given without --epsilon: there is no noise that it could be about")
    if not stated:
        return {}
    optional("dp_accounting", "privacy")
    return {"map": "landmarks", "landmarks": "free", **stated}


def status_of_folder(folder: Path, as_json: bool, recent: bool = False) -> Callable[[], Any]:
    """How to see where a federation stands: each call looks anew."""
    from apfl.federate.flower.admission import read_registered
    from apfl.federate.flower.contacts import contacts
    from apfl.federate.flower.events import Events, in_words

    def view() -> Any:
        events = [event for _, event in Events.read(folder / "events.jsonl")]
        restarts = [event for event in events if event["event"] == "restarted"][-N_LINES:]
        sites = read_registered(folder / "flower" / "registered.json")
        expected = [path.stem for path in (folder / "keys").glob("*.pub")]
        status = status_of(folder)
        known = {*expected, *(row["name"] for row in status["clients"])}
        heard = {name: one for name, one in contacts(folder, events).items() if name in known or one.connected}
        status |= {
            "contacts": {name: one._asdict() for name, one in sorted(heard.items())},
            "restarts": [{key: each[key] for key in ("at", "reason")} for each in restarts],
            "admitted": {name: site.key for name, site in sorted(sites.items())},
        }
        if as_json:
            return json.dumps(status)
        lines = [f"{_when(each['at'])} {each['reason']}" for each in restarts[-1:]]
        return status_view(status, expected, [in_words(event) for event in events[-N_LINES:]] if recent else lines)

    return view


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


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
