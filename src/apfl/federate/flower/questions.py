"""Questions to sites: those on their way, and those that are closed for this run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

__all__ = ["TYPES", "Ask", "Closed"]

TYPES = {
    "describe": "query.describe", "statistics": "train.statistics", "table": "train.table", "refine": "train.refine",
    "evaluate": "evaluate.metrics", "predict": "query.predict",
}  # fmt: skip
ATTEMPTS = 5  # for a site whose connection breaks while it is asked


@dataclass
class Ask:
    """A message on its way."""

    node: int
    client: str | None
    phase: str
    number: int
    at: float = field(default_factory=time.monotonic)

    @property
    def key(self) -> tuple[str, str, int]:
        """The question itself, whoever carries it."""
        return (self.client or str(self.node), self.phase, self.number)


class Closed:
    """Questions that are not asked again in this run, with the reason."""

    def __init__(self) -> None:
        self.reasons: dict[tuple[str, str, int], str] = {}
        self._attempts: dict[tuple[str, str, int], int] = {}

    def __contains__(self, key: object) -> bool:
        return key in self.reasons

    def close(self, key: tuple[str, str, int], why: str) -> None:
        """Answered, or not to be answered."""
        self.reasons[key] = why

    def broken(self, key: tuple[str, str, int], why: str) -> None:
        """The connection broke: worth another try, but not for ever."""
        self._attempts[key] = self._attempts.get(key, 0) + 1
        if self._attempts[key] >= ATTEMPTS:
            self.close(key, why)
