"""Identities and rosters as files: a site makes its identity, and confirms the roster by its fingerprint.

NAME.identity   the Ed25519 private key; stays at its site, and is all that makes a member
NAME.member     its public key; goes to whoever makes the roster
roster.json     names and public keys; the same file at every site and at the server
"""

from __future__ import annotations

import json
from pathlib import Path

from apfl.errors import InputError
from apfl.federate.names import check_name
from apfl.federate.secure import Roster, new_key, verifying_key
from apfl.federate.secure.ciphers import KEY_BYTES
from apfl.files import replacing

__all__ = ["collect", "make_identity", "read_identity", "read_roster", "rosters_of", "write_roster"]

LARGEST = 2**24  # bytes of a roster's file


def make_identity(folder: Path, name: str) -> tuple[Path, Path]:
    """The identity of a site, and its public part."""
    check_name("client", name)
    private, public = folder / f"{name}.identity", folder / f"{name}.member"
    if private.exists():
        raise InputError(f"{private} exists; rosters name it. Remove it to make another, and make the rosters anew")
    identity = new_key()
    _write(private, f"{identity.hex()}\n", 0o600)
    _write(public, f"{verifying_key(identity).hex()}\n", 0o644)
    return private, public


def read_identity(path: Path) -> bytes:
    """A site's private key."""
    return _key(path, "apfl federate keys FOLDER --site NAME --masked makes one")


def collect(folder: Path, without: set[str]) -> Roster:
    """A roster of the members whose public keys lie in a folder, but some."""
    paths = [path for path in sorted(folder.glob("*.member")) if path.stem not in without]
    if len(paths) < 2:
        raise InputError(
            f"{len(paths)} sites in {folder} are on no roster yet; put NAME.member of each site there "
            "(apfl federate keys FOLDER --site NAME --masked makes it)"
        )
    return Roster({path.stem: _key(path, "get it from its site again") for path in paths})


def write_roster(path: Path, roster: Roster) -> None:
    """The roster as a file, for everyone."""
    told = {name: key.hex() for name, key in roster.keys.items()}
    _write(path, json.dumps(told, indent=1, sort_keys=True) + "\n", 0o644)


def read_roster(path: Path) -> Roster:
    """The roster in a file."""
    try:
        if path.stat().st_size > LARGEST:
            raise ValueError("too large")
        told = json.loads(path.read_text())
        return Roster({name: bytes.fromhex(key) for name, key in told.items()})
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise InputError(f"{path} is no roster ({error}); get it again from whoever runs the server") from error


def rosters_of(folder: Path) -> list[Roster]:
    """The rosters in a server's folder, in the order in which they were made."""
    return [read_roster(path) for path in sorted((folder / "rosters").glob("*.json"))]


def _key(path: Path, remedy: str) -> bytes:
    try:
        key = bytes.fromhex(path.read_text().strip())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read ({error}); {remedy}") from error
    if len(key) != KEY_BYTES:
        raise InputError(f"{path} is no key of {KEY_BYTES} bytes; {remedy}")
    return key


def _write(path: Path, text: str, mode: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path) as temporary:
        temporary.touch(mode)
        temporary.write_text(text)
