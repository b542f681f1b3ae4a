"""Publications: the primary stream, numbered, with who is in it and who holds it."""

from __future__ import annotations

from dataclasses import dataclass

from apfl.federate.blobs import FolderError
from apfl.federate.ledger import Ledger, Row
from apfl.federate.messages import seal_publication
from apfl.federate.pool import Pool
from apfl.federate.private.publishing import noisy_primary, noisy_sum
from apfl.federate.terms import Terms
from apfl.federate.wire import sha256
from apfl.maths.personalise import solve_primary

__all__ = ["Publication", "load", "publish", "read", "retire_damaged"]


@dataclass(frozen=True, eq=False)
class Publication:
    """A published primary stream; ``data`` is what clients are sent."""

    number: int
    data: bytes
    members: tuple[str, ...]
    n_samples: int
    gamma: float


def load(ledger: Ledger, row: Row) -> Publication:
    """A publication with its bytes."""
    members = tuple(ledger.members(row["number"]))
    return Publication(row["number"], read(ledger, row), members, row["n"], row["gamma"])


def read(ledger: Ledger, row: Row) -> bytes:
    """The bytes of a publication, as they were published."""
    try:
        return ledger.blobs.read(row["blob"], row["sha256"])
    except FolderError as error:
        raise FolderError(
            f"publication {row['number']} has changed on disk or is missing; publish anew: apfl federate run "
            f"{ledger.folder}"
        ) from error


def retire_damaged(ledger: Ledger) -> None:
    """A current publication that has changed on disk is no longer the current one: the next run publishes anew."""
    row = ledger.current()
    if row is None:
        return
    try:
        read(ledger, row)
    except FolderError:
        with ledger.transaction():
            ledger.put("stale", "1")
            ledger.event("damaged", number=row["number"])


def publish(ledger: Ledger, pool: Pool, terms: Terms) -> Publication:
    """The primary of the sum as it is now; the current publication if that has the same members."""
    members, current = pool.members(), ledger.current()
    if current is not None and ledger.members(current["number"]) == members:
        return load(ledger, current)
    number = ledger.last_number() + 1
    data, gamma, unit, n = (_sealed_numbers if terms.numeric else _sealed)(ledger, pool, terms, number)
    blob = f"publication-{number}.safetensors"
    ledger.blobs.put(blob, data)
    with ledger.transaction():
        ledger.write_publication(
            members, number, blob=blob, sha256=sha256(data), bytes=len(data), gamma=gamma, unit=unit, n=n
        )
        ledger.event("published", number=number, members=len(members), n=n, gamma=gamma)
    return Publication(number, data, tuple(members), n, gamma)


Sealed = tuple[bytes, float, float, int]  # a publication; its gamma, the unit of beta, the rows behind it


def _sealed_numbers(ledger: Ledger, pool: Pool, terms: Terms, number: int) -> Sealed:
    from apfl.federate.numbers.server import seal  # it reads publications, too

    return seal(terms, number, pool, list(pool.members().values()))


def _sealed(ledger: Ledger, pool: Pool, terms: Terms, number: int) -> Sealed:
    account, members = None, pool.members()
    if terms.private:
        noisy = noisy_sum(ledger, pool, terms)
        primary, account = noisy_primary(noisy, terms), noisy.account
    else:
        primary = solve_primary(pool.running().statistics(), terms.method.gamma)
    stats = primary.stats
    shared = primary.with_leverage(terms.method.sketch, terms.seed) if terms.wants_leverage else primary.shared
    unit = primary.unit(terms.refinement_width)
    data = seal_publication(
        terms, number, primary.weights, primary.gamma, unit, stats.class_counts, shared.sketch, list(members.values()),
        account,
    )  # fmt: skip
    return data, primary.gamma, unit, stats.n_samples
