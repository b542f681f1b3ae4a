"""Clients' models that are made when they are asked for, where those of all do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import overload

from apfl.models.file import Model

__all__ = ["WhenAsked"]


class WhenAsked(Sequence[Model]):
    """``make`` gives the models of some clients; whoever goes through all of them has ``together`` at a time."""

    def __init__(self, n_clients: int, make: Callable[[Sequence[int]], Sequence[Model]], together: int) -> None:
        self._clients, self._make, self._together = range(n_clients), make, together

    def __len__(self) -> int:
        return len(self._clients)

    @overload
    def __getitem__(self, k: int) -> Model: ...
    @overload
    def __getitem__(self, k: slice) -> Sequence[Model]: ...
    def __getitem__(self, k: int | slice) -> Model | Sequence[Model]:
        if isinstance(k, slice):
            return self._make(self._clients[k])
        (only,) = self._make([self._clients[k]])
        return only

    def __iter__(self) -> Iterator[Model]:
        for first in range(0, len(self), self._together):
            yield from self[first : first + self._together]
