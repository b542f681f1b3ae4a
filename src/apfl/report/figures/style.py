"""How figures look: readable in print, without colour, and on a dark page.

The colours are those of Okabe and Ito, which people with any common colour blindness tell apart; a method also has its
own marker and line. For the page, the same drawing is turned into SVG whose colours are the page's.
"""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from apfl.errors import InputError
from apfl.files import replacing
from apfl.report.sheet import Row

__all__ = [
    "BLUE",
    "GREEN",
    "INK",
    "ORANGE",
    "VERMILLION",
    "Look",
    "drawing",
    "legend_below",
    "logarithmic",
    "looks",
    "save",
    "shared_legend",
    "themed",
]

INK, FAINT = "#1b1b1f", "#d5d5dc"
BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY = "#0072b2", "#d55e00", "#009e73", "#e69f00", "#cc79a7", "#56b4e9"
# What each becomes on the page, where light and dark differ.
VARIABLES = {
    INK: "--ink", FAINT: "--line", BLUE: "--blue", VERMILLION: "--vermillion", GREEN: "--green", ORANGE: "--orange",
    PURPLE: "--purple", SKY: "--sky",
}  # fmt: skip
MARKERS, LINES = "osD^vPXh<>", ("-", "--", "-.", ":")
RC: dict[Any, Any] = {
    "font.size": 9, "font.family": "sans-serif", "text.parse_math": False, "svg.fonttype": "none",
    "svg.hashsalt": "apfl", "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True,
    "axes.edgecolor": INK, "axes.labelcolor": INK, "axes.titlecolor": INK, "axes.axisbelow": True, "text.color": INK,
    "xtick.color": INK, "ytick.color": INK, "grid.color": FAINT, "grid.linewidth": 0.6, "axes.titlesize": 9,
    "legend.frameon": False, "legend.fontsize": 8, "pdf.fonttype": 42, "figure.dpi": 150,
}  # fmt: skip
TYPES = ("png", "svg", "pdf")


@dataclass(frozen=True)
class Look:
    """Colour, marker and line of one method in every figure."""

    colour: str
    marker: str
    line: str
    ours: bool = False

    @property
    def width(self) -> float:
        return 2.2 if self.ours else 1.3

    @property
    def size(self) -> float:
        return 11 if self.ours else 5


def looks(rows: Sequence[Row], ours: Row | None) -> dict[Row, Look]:
    """A look for every row; ours is the blue star."""
    colours = [VERMILLION, GREEN, ORANGE, PURPLE, SKY, INK]
    assigned = {ours: Look(BLUE, "*", "-", True)} if ours is not None else {}
    for i, row in enumerate(row for row in rows if row is not ours):
        look = Look(colours[i % len(colours)], MARKERS[i % len(MARKERS)], LINES[i // len(colours) % len(LINES)])
        assigned[row] = look
    return assigned


@contextmanager
def drawing() -> Iterator[None]:
    """Inside, figures look as this module says. Letters that the font lacks are left to the reader's own."""
    with matplotlib.rc_context(RC), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        yield


def logarithmic(axis: Axis, write: Callable[[float], str] = "{:g}".format) -> None:
    """A logarithmic axis with plain numbers on it."""
    axis.axes.set(**{f"{axis.axis_name}scale": "log"})  # type: ignore[attr-defined]
    axis.set_major_formatter(lambda value, _: write(value))
    axis.set_minor_formatter(NullFormatter())


def legend_below(axes: Axes, columns: int = 3) -> None:
    """The axes' legend under the x label, in the order of the alphabet, out of the way of the curves."""
    labels, handles = _entries([axes])
    if labels:
        fits = max(1, min(columns, 54 // (max(map(len, labels)) + 5)))
        axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=fits, handlelength=2.6)


def shared_legend(figure: Figure) -> None:
    """One legend under all panels, as wide as they are."""
    labels, handles = _entries(figure.axes)
    if labels:
        letters = 15 * figure.get_figwidth()  # that fit beside each other
        fits = max(1, min(len(labels), int(letters / (max(map(len, labels)) + 9))))
        figure.set_figheight(figure.get_figheight() + 0.18 * math.ceil(len(labels) / fits))
        figure.legend(handles, labels, loc="outside lower center", ncols=fits, handlelength=2.6)


def _entries(panels: Sequence[Axes]) -> tuple[list[str], list[Any]]:
    """Labels and handles in the order of the alphabet, each label once."""
    handle_of: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handle_of.setdefault(label, handle)
    labels = sorted(handle_of)
    return labels, [handle_of[label] for label in labels]


def save(figure: Figure, path: Path) -> None:
    """Write the figure; the type is the file's ending."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in TYPES:
        raise InputError(f"--out {path} given; figures end in .png, .svg or .pdf")
    undated = {"png": {}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}[kind]
    with drawing(), replacing(path) as temporary, temporary.open("wb") as stream:
        figure.savefig(stream, format=kind, bbox_inches="tight", facecolor="white", metadata=undated, dpi=200)


def themed(figure: Figure, description: str, prefix: str) -> str:
    """The figure as an ``svg`` element whose colours follow the page. ``prefix`` keeps ids apart on one page."""
    stream = io.StringIO()
    with drawing():
        figure.savefig(stream, format="svg", bbox_inches="tight", transparent=True, metadata={"Date": None})
    svg = stream.getvalue()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
    svg = re.sub(r'<g id="[a-z]+(?:[._][a-zA-Z0-9_]+)*">', "<g>", svg)  # names of artists, the same in every figure
    svg = re.sub(r'\b(id="|href="#|url\(#)', rf"\g<1>{prefix}", svg)
    for colour, variable in VARIABLES.items():
        svg = re.sub(re.escape(colour), f"var({variable})", svg, flags=re.IGNORECASE)
    svg = re.sub(r'(<svg [^>]*?)width="([\d.]+)pt" height="[\d.]+pt"', r"\1", svg, count=1)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{_attribute(description)}" ', 1)


def _attribute(words: str) -> str:
    return words.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;").replace(">", "&gt;")
