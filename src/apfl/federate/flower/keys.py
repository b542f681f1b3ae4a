"""Certificates for the server and a key pair for every site, in one folder.

The certificate authority signs one server certificate, by which sites know the server. A site is known by its key
(P-384, the curve Flower asks for): the server lists the public keys it admits, and the private key stays at its site.
The authority also certifies the federation's Ed25519 key, which signs instructions (`apfl.federate.instructions`).
"""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from apfl.errors import InputError, optional
from apfl.federate.instructions import COMMON_NAME
from apfl.federate.names import check_name
from apfl.files import replacing

__all__ = ["ServerKeys", "make_certificates", "make_site_key", "public_keys", "signing_key"]

ALWAYS = ("localhost", "127.0.0.1", "::1")  # the server's own processes reach it here
DAY = timedelta(days=1)


@dataclass(frozen=True)
class ServerKeys:
    """Where the server's certificate lies."""

    folder: Path

    @property
    def authority(self) -> Path:
        """The certificate every site needs: it is public."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def private(self) -> Path:
        return self.folder / "server.key"

    def check(self) -> ServerKeys:
        """These keys, or an error that says how to make them."""
        for path in (self.authority, self.certificate, self.private):
            if not path.is_file():
                raise InputError(
                    f"there is no {path}; make certificates first: apfl federate keys {self.folder} --host NAME"
                )
        return self


def make_certificates(folder: Path, hosts: Sequence[str], days: int = 825) -> ServerKeys:
    """A certificate authority, kept if it is there already, and a new server certificate for ``hosts``.

    The authority's private key stays in ``ca.key``, so that the server's certificate can be renewed.
    """
    both = ServerKeys(folder).authority, folder / "ca.key"
    if sum(path.exists() for path in both) == 1:
        here, missing = both if both[0].exists() else both[::-1]
        raise InputError(
            f"{here} is there and {missing.name} is not; put it back to sign a server certificate, "
            "or choose another folder for a new authority"
        )
    x509 = optional("cryptography.x509", "flower")
    keys = ServerKeys(folder)
    if not keys.authority.exists():
        key = _private_key()
        name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "apfl federation")])
        _write_private(folder / "ca.key", _pem(key))
        _write(keys.authority, _signed(key, name, key, name, [], 10 * 365, authority=True))
    authority_key, issuer = _issuer(keys)
    key = _private_key()
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, hosts[0] if hosts else "localhost")])
    names = list(dict.fromkeys([*hosts, *ALWAYS]))
    _write_private(keys.private, _pem(key))
    _write(keys.certificate, _signed(key, subject, authority_key, issuer, names, days, authority=False))
    return keys


def make_site_key(folder: Path, name: str) -> tuple[Path, Path]:
    """The key pair of one site: NAME.key stays there, NAME.pub is registered at the server."""
    check_name("client", name)
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    if private.exists():
        raise InputError(f"{private} exists; a site keeps its key, or it could not leave. Remove it to make another")
    key = _private_key()
    _write_private(
        private,
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
        ),
    )
    ssh = key.public_key().public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    _write(public, ssh + f" {name}\n".encode())
    return private, public


def signing_key(folder: Path) -> tuple[bytes, bytes]:
    """The key in a server's folder that signs instructions, made once, and what vouches for it (both PEM).

    That is a certificate of the folder's authority; without an authority, the bare public key.
    """
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    private, certificate, keys = folder / "signing.key", folder / "signing.crt", ServerKeys(folder / "keys")
    if not private.exists():
        ed25519 = optional("cryptography.hazmat.primitives.asymmetric.ed25519", "flower")
        _write_private(private, _pem(ed25519.Ed25519PrivateKey.generate()))
    key = serialization.load_pem_private_key(private.read_bytes(), None)
    if not keys.authority.exists():
        pem = serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        return private.read_bytes(), key.public_key().public_bytes(*pem)
    if not _certifies(certificate, keys.authority, key.public_key()):
        _write(certificate, _certified(key, keys))
    return private.read_bytes(), certificate.read_bytes()


def _certifies(certificate: Path, authority: Path, key: Any) -> bool:
    """Whether a certificate is of this key, and this authority issued it."""
    x509 = optional("cryptography.x509", "flower")
    invalid = optional("cryptography.exceptions", "flower").InvalidSignature
    try:
        present = x509.load_pem_x509_certificate(certificate.read_bytes())
        present.verify_directly_issued_by(x509.load_pem_x509_certificate(authority.read_bytes()))
    except (OSError, ValueError, TypeError, invalid):
        return False
    return bool(present.public_key() == key)


def _certified(key: Any, keys: ServerKeys) -> bytes:
    """A certificate of the key that signs instructions."""
    if not (keys.folder / "ca.key").exists():
        raise InputError(
            f"{keys.folder / 'ca.key'} is not there, and it must certify once the key that signs this federation's "
            "instructions; put it back for one start"
        )
    x509 = optional("cryptography.x509", "flower")
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, COMMON_NAME)])
    return _signed(key, name, *_issuer(keys), [], 10 * 365, authority=False)


def _issuer(keys: ServerKeys) -> tuple[Any, Any]:
    """The authority's private key and its name."""
    x509 = optional("cryptography.x509", "flower")
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    private = serialization.load_pem_private_key((keys.folder / "ca.key").read_bytes(), None)
    return private, x509.load_pem_x509_certificate(keys.authority.read_bytes()).subject


def public_keys(folder: Path) -> dict[str, Path]:
    """Name -> public key of the sites that ``folder`` admits."""
    return {path.stem: path for path in sorted(folder.glob("*.pub"))}


def _private_key() -> Any:
    ec = optional("cryptography.hazmat.primitives.asymmetric.ec", "flower")
    return ec.generate_private_key(ec.SECP384R1())


def _pem(key: Any) -> bytes:
    serialization = optional("cryptography.hazmat.primitives.serialization", "flower")
    pem: bytes = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    return pem


def _signed(
    key: Any, subject: Any, signer: Any, issuer: Any, hosts: Iterable[str], days: int, *, authority: bool
) -> bytes:
    x509 = optional("cryptography.x509", "flower")
    primitives = optional("cryptography.hazmat.primitives", "flower")
    now = datetime.now(UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - DAY)  # clocks differ
        .not_valid_after(now + days * DAY)
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), critical=False)
        .add_extension(_usage(authority), critical=True)
    )
    names = [_general_name(host) for host in hosts]
    if names:
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
        server = x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH])
        builder = builder.add_extension(server, critical=False)
    certificate = builder.sign(signer, primitives.hashes.SHA256())
    pem: bytes = certificate.public_bytes(primitives.serialization.Encoding.PEM)
    return pem


def _usage(authority: bool) -> Any:
    x509 = optional("cryptography.x509", "flower")
    return x509.KeyUsage(
        digital_signature=not authority, key_cert_sign=authority, crl_sign=authority, content_commitment=False,
        key_encipherment=False, data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def _general_name(host: str) -> Any:
    x509 = optional("cryptography.x509", "flower")
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(path: Path, content: bytes, mode: int = 0o644) -> None:
    """Nobody else may write here, whatever the umask: the keys in a server's folder decide who is admitted."""
    with suppress(OSError):  # then `replacing` says why
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with replacing(path) as temporary:
        temporary.touch(mode)
        temporary.write_bytes(content)


def _write_private(path: Path, content: bytes) -> None:
    """Readable by its owner alone from the first byte on."""
    _write(path, content, 0o600)
