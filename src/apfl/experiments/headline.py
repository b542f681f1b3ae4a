"""The one number that a kind of target is judged by first, and how it is written."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from apfl.data.targets import Target

__all__ = ["HEADLINES", "Headline"]


@dataclass(frozen=True)
class Headline:
    """A measure of one client's model on its own test rows; records have its mean over clients."""

    key: str  # in names: accuracy_client_mean
    word: str  # in sentences and on axes
    percent: bool = True
    higher_is_better: bool = True

    @property
    def metric(self) -> str:
        """The name of its mean over clients."""
        return f"{self.key}_client_mean"

    @property
    def factor(self) -> float:
        """From a value to what is shown."""
        return 100.0 if self.percent else 1.0

    @property
    def sign(self) -> int:
        """1 if more is better, else -1."""
        return 1 if self.higher_is_better else -1

    @property
    def axis(self) -> str:
        """The label of an axis with its mean over clients."""
        return f"{self.word}, mean over clients" + (" (%)" if self.percent else "")

    @property
    def of_one(self) -> str:
        """The label of an axis with single clients."""
        return f"{self.word} of one client" + (" (%)" if self.percent else "")

    @property
    def difference(self) -> str:
        """What a difference of two is counted in."""
        return "points" if self.percent else self.word

    def write(self, value: float, digits: int = 1) -> str:
        """A value as text, without its unit.

        >>> HEADLINES["classification"].write(0.917), HEADLINES["regression"].write(54.321)
        ('91.7', '54.32')
        """
        return f"{100 * value:.{digits}f}" if self.percent else f"{value:.{digits + 3}g}"

    def said(self, value: float, digits: int = 1) -> str:
        """A value as text, with its unit."""
        number = f"{self.write(value, digits)} %" if self.percent else self.write(value, digits)
        return number if self.key == "accuracy" else f"{self.word} {number}"

    def apart(self, value: float, digits: int = 1) -> str:
        """A difference as text, with its sign."""
        return f"{100 * value:+.{digits}f}" if self.percent else f"{value:+.{digits + 2}g}"


HEADLINES: Mapping[Target, Headline] = {
    "classification": Headline("accuracy", "accuracy"),
    "regression": Headline("rmse", "RMSE", percent=False, higher_is_better=False),
    "multilabel": Headline("map", "mAP"),
}
