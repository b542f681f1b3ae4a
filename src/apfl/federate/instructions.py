"""Instructions: what the server asks of a site, signed with the federation's key, and obeyed once.

Whoever is registered with the transport could send a site a message. So a site obeys only what the federation's
Ed25519 key signed for it: for this federation, this run, this node and site, this kind of question and these very
payloads, under a number that only rises. The certificate authority that vouches for the server's address (``ca.crt``)
vouches for this key, too, and a site obeys no key that one certified later has replaced. A site without an authority,
on loopback, keeps the first key that it sees.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from apfl.errors import InputError, optional, printable
from apfl.federate.ledger import Ledger
from apfl.federate.wire import sha256
from apfl.files import flush, hold, replacing

__all__ = ["Instruction", "Recipient", "Signer", "fingerprint_of", "hashes"]

COMMON_NAME = "apfl federation instructions"  # of the certificate; the authority may issue others for other uses
CONTEXT = b"apfl instruction 1\n"  # before what is signed, so that the signature serves for nothing else
FIELDS = ("instruction", "signature", "voucher")  # as they travel
N_NODES = 16  # whose last number a site keeps; numbers of its former nodes are of no use to anyone
PATIENCE = 60.0  # seconds for another process of the site that keeps a number

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Instruction:
    """What is signed: a question, to whom and in which run; ``payloads`` are their SHA-256 by name."""

    federation: str
    run: str
    node: str  # the site's node, by the transport's number
    site: str  # its name; empty while the server does not know it
    kind: str
    payloads: dict[str, str]
    number: int = 0

    def to_json(self) -> str:
        """The statement as it is signed and travels."""
        return json.dumps(asdict(self), sort_keys=True)


def hashes(payloads: Mapping[str, bytes]) -> dict[str, str]:
    """The SHA-256 of each payload."""
    return {name: sha256(data) for name, data in payloads.items()}


class Signer:
    """The federation's key at the server; ``voucher`` is its certificate, or without an authority the bare key."""

    def __init__(self, private: bytes, voucher: bytes, ledger: Ledger) -> None:
        serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
        self.key = serialization.load_pem_private_key(private, None)
        self.voucher, self.ledger = voucher.decode(), ledger

    def sign(self, instruction: Instruction) -> dict[str, str]:
        """The instruction with the next number, its signature and the voucher, as settings of a message."""
        text = Instruction(**(asdict(instruction) | {"number": self._next_number()})).to_json()
        return dict(zip(FIELDS, (text, self.key.sign(CONTEXT + text.encode()).hex(), self.voucher), strict=True))

    def _next_number(self) -> int:
        """Higher than every one before: also after the clock was set back, or the folder restored from a backup."""
        number = max(int(self.ledger.get("instruction") or 0) + 1, time.time_ns() // 1000)
        with self.ledger.transaction(decisive=False):
            self.ledger.put("instruction", str(number))
        return number


class Recipient:
    """A site's side: ``accept`` raises unless an instruction is the federation's, for this site, and new.

    ``authority`` is the certificate (PEM) that vouches for the key. Without one the first key is kept in ``folder``.
    """

    def __init__(self, folder: Path, site: str, node: str, authority: bytes | None = None) -> None:
        self.folder, self.site, self.node, self.authority = folder, site, node, authority
        self.pinned, self.newest = folder / "federation.pub", folder / "federation.crt"
        self.numbers = folder / "instructions.json"

    def accept(self, settings: Mapping[str, Any], expected: Instruction) -> None:
        """Check everything that the instruction says against ``expected``, and note its number."""
        if not all(isinstance(settings.get(field), str) for field in FIELDS):
            raise InputError("it is not signed; server and sites need the same version of apfl")
        told, signature, voucher = (str(settings[field]) for field in FIELDS)
        with suppress(OSError):  # then `hold` says why
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with hold(self.folder / "instructions.lock", wait=PATIENCE, private=True):
            key = self._trusted(voucher.encode())
            _verify(key, signature, told)
            number = self._bound(told, expected)
            self._pin(key, voucher.encode())
            self._note(number)

    def _trusted(self, voucher: bytes) -> Any:
        """The key that the voucher names, if this site trusts it."""
        key = _vouched(voucher, self.authority) if self.authority is not None else _any_key(voucher)
        if self.authority is None and self.pinned.exists() and _pem(key) != self.pinned.read_bytes():
            raise InputError(
                f"its key {_fingerprint(key)} is not the one that this site saw first ({self.pinned}); if the server "
                "was set up anew, remove that file and join again"
            )
        if self.authority is not None and _certified_before(voucher, self._newest()):
            raise InputError(
                f"its key {_fingerprint(key)} was replaced by one that is certified later ({self.newest}); if the "
                "server's folder was restored from a backup, remove its signing.key, and it makes another"
            )
        return key

    def _newest(self) -> bytes | None:
        """The certificate of the last key that this site obeyed, if its authority is still the one that issued it."""
        with suppress(OSError, InputError):
            kept = self.newest.read_bytes()
            _vouched(kept, self.authority or b"")
            return kept
        return None

    def _bound(self, text: str, expected: Instruction) -> int:
        """The number of an instruction that says what is expected."""
        try:
            instruction = Instruction(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise InputError("its statement cannot be read; server and sites need the same version of apfl") from error
        wanted, received = asdict(expected), asdict(instruction)
        for field in ("federation", "run", "node", "kind", "payloads"):
            if received[field] != wanted[field]:
                raise InputError(f"it was signed for another {field.rstrip('s')}")
        if instruction.site not in ("", self.site):
            raise InputError("it was signed for another site")
        if isinstance(instruction.number, bool) or not isinstance(instruction.number, int):
            raise InputError("it has no number")
        return instruction.number

    def _pin(self, key: Any, voucher: bytes) -> None:
        """Keep the last key that the authority vouched for; without an authority, the first."""
        if self.authority is not None and voucher != self._newest():
            _write(self.newest, voucher)
        if self.authority is None and not self.pinned.exists():
            _write(self.pinned, _pem(key))
            log.warning(
                "this site trusts the federation's key %s on first contact, and no other from now on: compare it "
                "with the one that the server prints when it starts", _fingerprint(key),
            )  # fmt: skip

    def _note(self, number: int) -> None:
        """Keep the number, on the disk, before anything is done; one that is not higher is a repetition."""
        last = self._last()
        if number <= last.get(self.node, 0):
            raise InputError("it was obeyed already")
        kept = {**{node: last[node] for node in last if node != self.node}, self.node: number}
        _write(self.numbers, json.dumps(dict(list(kept.items())[-N_NODES:])).encode())
        flush(self.folder)

    def _last(self) -> dict[str, int]:
        try:
            last = json.loads(self.numbers.read_text()) if self.numbers.exists() else {}
            return {str(node): int(number) for node, number in last.items()}
        except (OSError, ValueError, AttributeError, TypeError) as error:
            raise InputError(f"{self.numbers} cannot be read ({error}); restore it, or remove it to go on") from error


def _write(path: Path, content: bytes) -> None:
    """Nobody else may change, or read, whom this site trusts."""
    with replacing(path) as temporary:
        temporary.touch(0o600)
        temporary.write_bytes(content)


def fingerprint_of(voucher: bytes) -> str:
    """The fingerprint of the key that a voucher names, for people to compare."""
    return _fingerprint(_any_key(voucher))


def _fingerprint(key: Any) -> str:
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    return sha256(key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))


def _pem(key: Any) -> bytes:
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    pem: bytes = key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    return pem


def _verify(key: Any, signature: str, text: str) -> None:
    invalid = optional("cryptography.exceptions", "flower").InvalidSignature
    try:
        key.verify(bytes.fromhex(signature), CONTEXT + text.encode())
    except (invalid, ValueError) as error:
        raise InputError("its signature is not that of the federation's key") from error


def _vouched(voucher: bytes, authority: bytes) -> Any:
    """The key of a certificate that the authority issued for instructions."""
    x509 = optional("cryptography.x509", "flower")
    invalid = optional("cryptography.exceptions", "flower").InvalidSignature
    unsupported = optional("cryptography.exceptions", "flower").UnsupportedAlgorithm
    try:
        certificate = x509.load_pem_x509_certificate(voucher)
        certificate.verify_directly_issued_by(x509.load_pem_x509_certificate(authority))
        key = certificate.public_key()
        names = [each.value for each in certificate.subject.get_attributes_for_oid(x509.NameOID.COMMON_NAME)]
    except (invalid, unsupported, ValueError, TypeError) as error:
        raise InputError("its key was not certified by this site's authority (--ca)") from error
    signing = _ed25519(key)
    if names != [COMMON_NAME]:
        raise InputError(f"its key was certified for '{printable(', '.join(map(str, names)), 80)}', not instructions")
    return signing


def _certified_before(voucher: bytes, newest: bytes | None) -> bool:
    """Whether another key was certified after the one of this certificate."""
    if newest is None or voucher == newest:
        return False
    one, other = map(optional("cryptography.x509", "flower").load_pem_x509_certificate, (voucher, newest))
    return one.public_key() != other.public_key() and bool(one.not_valid_before_utc <= other.not_valid_before_utc)


def _any_key(voucher: bytes) -> Any:
    """The key of a certificate, or a bare public key."""
    x509 = optional("cryptography.x509", "flower")
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    unsupported = optional("cryptography.exceptions", "flower").UnsupportedAlgorithm
    try:
        if b"CERTIFICATE" in voucher:
            return _ed25519(x509.load_pem_x509_certificate(voucher).public_key())
        return _ed25519(serialization.load_pem_public_key(voucher))
    except (ValueError, TypeError, unsupported) as error:
        raise InputError("its key cannot be read") from error


def _ed25519(key: Any) -> Any:
    """The key, if it is of the kind that signs instructions: the server's own certificate, say, has another."""
    if not isinstance(key, optional("cryptography.hazmat.primitives.asymmetric.ed25519", "flower").Ed25519PublicKey):
        raise InputError("its key is not one for instructions")
    return key
