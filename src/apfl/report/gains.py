"""Who gains by taking part, and who loses: each client's accuracy minus what it reaches by itself.

The standard error is that of a difference of two shares of the client's test rows,

    sqrt((p (1 - p) + q (1 - q)) / n)        p: taking part, q: going alone, n: test rows

as if other rows had been drawn for each; of numbers it is sqrt((p^2 + q^2) / 2n), that of two RMSEs with normal errors
(of several labels the first, roughly). Both are measured on the same rows, so it is too large rather than too small.
Several seeds are averaged; their test rows overlap, so they do not make it smaller. A gain or loss is clear beyond two
standard errors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from apfl.errors import printable
from apfl.experiments.headline import HEADLINES, Headline
from apfl.experiments.record import Record

__all__ = ["Gain", "client_gains", "compared_with_alone", "gains_in_words", "gains_table"]

OURS = "apfl"
REFERENCES = ("local_ridge", "local_head", "central")  # going alone, or nobody's model of a federation
SHOWN = 24  # clients of the table, half of them from either end
CLEAR = 2  # standard errors


@dataclass(frozen=True)
class Gain:
    """One client, means over seeds; accuracies are fractions."""

    client: str
    n_test: float
    alone: float
    together: float
    headline: Headline = HEADLINES["classification"]

    @property
    def value(self) -> float:
        """What it gains; of errors, by how much they are less."""
        return self.headline.sign * (self.together - self.alone)

    @property
    def standard_error(self) -> float:
        if not self.headline.percent:
            return math.sqrt((self.together**2 + self.alone**2) / (2 * self.n_test))
        return math.sqrt((self.together * (1 - self.together) + self.alone * (1 - self.alone)) / self.n_test)

    @property
    def clear(self) -> bool:
        return abs(self.value) > CLEAR * self.standard_error


def compared_with_alone(records: Sequence[Record]) -> list[Record]:
    """The records of the method to compare with going alone: apfl, or else the last that is more than a reference."""
    methods = [record.method for record in records if record.method not in REFERENCES]
    chosen = OURS if OURS in methods else methods[-1] if methods else None
    return [record for record in records if record.method == chosen]


def client_gains(together: Sequence[Record], alone: Sequence[Record]) -> list[Gain]:
    """Each client that has test rows, who gains most first; over the seeds that both have."""
    by_seed = {record.seed: record for record in alone}
    rows: dict[str, list[tuple[int, float, float]]] = {}
    for record in together:
        other = by_seed.get(record.seed)
        if other is None or list(other.client_names) != list(record.client_names):
            continue
        both = zip(record.client_scores, other.client_scores, strict=True)
        for name, n, (own, by_itself) in zip(record.client_names, record.n_test, both, strict=True):
            if own is not None and by_itself is not None:
                rows.setdefault(name, []).append((n, by_itself, own))
    means = {name: [float(value) for value in np.mean(seen, axis=0)] for name, seen in rows.items()}
    gains = [Gain(name, n, by_itself, own, together[0].headline) for name, (n, by_itself, own) in means.items()]
    return sorted(gains, key=lambda gain: -gain.value)


def gains_table(together: Sequence[Record], alone: Sequence[Record]) -> Table:
    """A line for each client; of many clients those who gain most and those who gain least."""
    gains, method = client_gains(together, alone), together[0].method
    table = Table(title="against going alone", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left")
    table.add_column("client", no_wrap=True)
    for heading in ("test rows", "alone", method, "gain", "± s.e."):
        table.add_column(heading, justify="right", no_wrap=True)
    many = len(gains) > SHOWN
    for i, gain in enumerate(gains if not many else gains[: SHOWN // 2] + gains[-SHOWN // 2 :]):
        if many and i == SHOWN // 2:
            table.add_row(f"... {len(gains) - SHOWN} more", *[""] * 5)
        first = gain.headline
        shown = (first.write(gain.alone), first.write(gain.together), first.apart(gain.value))
        name, error = Text(printable(gain.client, 40)), first.apart(gain.standard_error)[1:]  # Text: '[a]' stays '[a]'
        table.add_row(name, f"{gain.n_test:.0f}", *shown, error, style="bold" if gain.clear else None)
    return table


def gains_in_words(together: Sequence[Record], alone: Sequence[Record]) -> str:
    """How many gain and lose, how many of them clearly, and by how much on average."""
    gains, method = client_gains(together, alone), together[0].method
    if not gains:
        return "no client has test rows in common with going alone"
    gain, lose = (sum(sign * each.value > 0 for each in gains) for sign in (1, -1))
    clearly = [sum(sign * each.value > 0 and each.clear for each in gains) for sign in (1, -1)]
    worst, first = gains[-1], gains[0].headline
    most = f"; most: {printable(worst.client, 40)}, {first.apart(worst.value)}" if worst.value < 0 else ""
    return (
        f"{method} against going alone (a ridge on the client's own rows, chosen by its left-out rows): "
        f"{gain} of {len(gains)} clients gain ({clearly[0]} clearly), {lose} lose ({clearly[1]} clearly{most}); "
        f"mean {first.apart(float(np.mean([each.value for each in gains])))} {first.difference}. "
        f"Clearly (bold): by more than {CLEAR} standard errors."
    )
