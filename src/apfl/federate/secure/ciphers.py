"""Keys, signatures and ciphers, all of them from the ``cryptography`` package.

X25519 agrees on a secret (RFC 7748), HKDF-SHA256 makes one key for each purpose from it (RFC 5869), ChaCha20-Poly1305
encrypts shares (RFC 8439), Ed25519 signs (RFC 8032), and AES-256 in counter mode stretches a key into a mask. The
purpose, the round and the names of both sides enter every key and every signature, so that none serves for another.
"""

from __future__ import annotations

import hashlib
import os
from functools import lru_cache
from typing import Any

from apfl.errors import InputError, optional

__all__ = [
    "KEY_BYTES", "SIGNATURE_BYTES", "agree", "decrypt", "derive", "encrypt", "is_signed", "keystream", "labelled",
    "new_key", "public_of", "sign", "verifying_key",
]  # fmt: skip

KEY_BYTES = 32
SIGNATURE_BYTES = 64
NONCE_BYTES = 12
SEALED_BYTES = NONCE_BYTES + 16  # what encryption adds: nonce and tag
CONTEXT = b"apfl masked sum 1"
HAZMAT = "cryptography.hazmat.primitives"


def _of(module: str) -> Any:
    return optional(f"{HAZMAT}.{module}", "flower")


def labelled(purpose: str, *parts: bytes) -> bytes:
    """What a key or a signature is for, with the length of each part before it: no two lists give the same bytes."""
    return b"".join(len(part).to_bytes(4) + part for part in (CONTEXT, purpose.encode(), *parts))


def new_key() -> bytes:
    """A fresh private key for X25519 or Ed25519, or a seed."""
    return os.urandom(KEY_BYTES)


def public_of(private: bytes) -> bytes:
    """The X25519 public key."""
    return bytes(_private(private).public_key().public_bytes_raw())


@lru_cache(maxsize=4)  # reading a private key takes as long as agreeing with it, and a member agrees with many
def _private(private: bytes) -> Any:
    return _of("asymmetric.x25519").X25519PrivateKey.from_private_bytes(private)


def agree(private: bytes, public: bytes) -> bytes:
    """The secret that two sides share, by X25519; a public key of low order is refused."""
    x25519 = _of("asymmetric.x25519")
    try:
        return bytes(_private(private).exchange(x25519.X25519PublicKey.from_public_bytes(public)))
    except ValueError as error:
        raise InputError("an advertised key is not one to agree with; its owner must make a new one") from error


def derive(secret: bytes, round_id: bytes, label: bytes) -> bytes:
    """One key for one purpose, by HKDF-SHA256 with the round as salt."""
    hkdf = _of("kdf.hkdf").HKDF(_of("hashes").SHA256(), KEY_BYTES, round_id, label)
    return bytes(hkdf.derive(secret))


def encrypt(key: bytes, data: bytes, bound_to: bytes) -> bytes:
    """Nonce, ciphertext and tag."""
    nonce = os.urandom(NONCE_BYTES)
    return nonce + bytes(_of("ciphers.aead").ChaCha20Poly1305(key).encrypt(nonce, data, bound_to))


def decrypt(key: bytes, sealed: bytes, bound_to: bytes) -> bytes | None:
    """What was encrypted, or None if it was not with this key and for this use."""
    cipher = _of("ciphers.aead").ChaCha20Poly1305(key)
    try:
        return bytes(cipher.decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], bound_to))
    except optional("cryptography.exceptions", "flower").InvalidTag:
        return None


def verifying_key(private: bytes) -> bytes:
    """The Ed25519 public key of an identity."""
    key = _of("asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(private)
    return bytes(key.public_key().public_bytes_raw())


def sign(private: bytes, statement: bytes) -> bytes:
    """The Ed25519 signature of an identity."""
    return bytes(_of("asymmetric.ed25519").Ed25519PrivateKey.from_private_bytes(private).sign(statement))


def is_signed(public: bytes, signature: bytes, statement: bytes) -> bool:
    """Whether the identity with this public key signed the statement."""
    try:
        _of("asymmetric.ed25519").Ed25519PublicKey.from_public_bytes(public).verify(signature, statement)
    except (optional("cryptography.exceptions", "flower").InvalidSignature, ValueError):
        return False
    return True


def digest(data: bytes) -> bytes:
    """SHA-256."""
    return hashlib.sha256(data).digest()


def keystream(key: bytes) -> Any:
    """An encryptor of AES-256 in counter mode from 0: what it makes of zeros is the stream. Each key has one use."""
    ciphers = _of("ciphers")
    return ciphers.Cipher(ciphers.algorithms.AES(key), ciphers.modes.CTR(bytes(16))).encryptor()
