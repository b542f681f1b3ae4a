"""The same table for the terminal, Markdown, LaTeX and CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Container, Sequence
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from apfl.report.published import SOURCE
from apfl.report.results import Cell, Results
from apfl.report.sheet import Column, Row
from apfl.report.summary import difference_notes, notes, summary

__all__ = ["FORMATS", "as_csv", "latex", "markdown", "text", "written"]

NONE = "–"


def written(cell: Cell | None, results: Results, digits: int, plus: str = "±") -> str:
    """Mean ± spread, with the number of seeds where it is not the usual one."""
    if cell is None:
        return NONE
    value = results.metric.write(cell.mean, digits)
    spread = "" if cell.std is None else f" {plus} {results.metric.write(cell.std, digits)}"
    return value + spread + ("" if cell.seeds == results.usual_seeds else f" n={len(cell.seeds)}")


def points(results: Results, row: Row, column: Column, digits: int = 1) -> str:
    """A difference with its interval, starred if it is clear, with the number of seeds if it is not the usual one."""
    difference = results.differences.get((row, column))
    if difference is None:
        return NONE
    low, value, high = (results.metric.apart(x, digits) for x in (difference.low, difference.value, difference.high))
    n_seeds = "" if difference.n_seeds == results.usual_compared else f" n={difference.n_seeds}"
    return f"{value} [{low}, {high}]" + ("*" if difference.clear else "") + n_seeds


def others(results: Results) -> list[Row]:
    """The rows that ours is compared with."""
    return [row for row in results.rows if any((row, column) in results.differences for column in results.columns)]


def blocks(results: Results, width: int, of: Callable[[Row, Column], str]) -> list[list[Column]]:
    """Columns in groups of the same data that fit side by side, with ``of`` as their cells."""
    left = max(width, 60) - max(len(row.label) for row in results.rows) - 4
    found: list[list[Column]] = []
    room = 0
    for column in results.columns:
        needed = max(len(text) for text in [*column.parts[1:], *(of(row, column) for row in results.rows)]) + 2
        if not found or needed > room or found[-1][0].parts[0] != column.parts[0]:
            found.append([])
            room = left
        found[-1].append(column)
        room -= needed
    return found


def heading(column: Column, block: Sequence[Column]) -> list[str]:
    """The parts of a column's name that are not common to all of a block."""
    shared = _shared(block)
    return [part for part in column.parts if part not in shared] or [column.parts[-1]]


def title(block: Sequence[Column]) -> str:
    """The parts common to all columns of a block."""
    shared = [part for part in block[0].parts if part in _shared(block)]
    return ", ".join(shared) or f"{len(block)} federations"


def _shared(block: Sequence[Column]) -> set[str]:
    return set.intersection(*(set(column.parts) for column in block))


def terminal(results: Results, width: int, digits: int = 1) -> RenderableType:
    """For people: as many columns side by side as fit."""

    def cell(row: Row, column: Column) -> Text:
        return _styled(results, row, column, digits)

    def apart(row: Row, column: Column) -> Text:
        return Text(points(results, row, column, digits))

    shown: list[RenderableType] = []
    for block in blocks(results, width, lambda row, column: cell(row, column).plain):
        shown.append(_rich(title(block), block, rows_of(block, results, results.cells), cell))
    shown += [Text(line, style="dim") for line in notes(results, ("bold", "underlined"), SOURCE)]
    if results.ours is not None and results.differences:
        shown.append(Text(""))
        for block in blocks(results, width, lambda row, column: apart(row, column).plain):
            if rows := rows_of(block, results, results.differences):
                shown.append(
                    _rich(
                        f"{results.ours.label} minus …, in {results.metric.points}: {title(block)}", block, rows, apart
                    )
                )
        shown += [Text(" ".join(difference_notes(results)), style="dim")]
    return Group(*shown, Text(""), *(Text(line) for line in summary(results)))


def _rich(name: str, block: Sequence[Column], rows: Sequence[Row], of: Callable[[Row, Column], Text]) -> Table:
    table = Table(
        box=SIMPLE_HEAD, padding=(0, 1, 0, 0), title=Text(name), title_justify="left", min_width=len(name) + 2
    )
    table.add_column("method", no_wrap=True)
    for column in block:
        table.add_column(Text("\n".join(heading(column, block))), justify="right", no_wrap=True)
    for row in rows:
        table.add_row(Text(row.label), *(of(row, column) for column in block))
    return table


def _styled(results: Results, row: Row, column: Column, digits: int) -> Text:
    cell = results.cells.get((row, column))
    value = written(cell, results, digits)
    shown = Text()
    shown.append(value, style={1: "bold", 2: "underline"}.get(cell.place if cell else 0))
    if cell is not None and cell.published is not None:
        shown.append(f" ({results.metric.write(cell.published, digits)})", style="dim")
    return shown


def text(results: Results, digits: int = 1) -> str:
    """The terminal's table without colours, for a file."""
    stream = io.StringIO()
    Console(file=stream, width=160, color_system=None).print(terminal(results, 160, digits))
    return "".join(f"{line.rstrip()}\n" for line in stream.getvalue().splitlines())


Written = Callable[[Row, Column], str]


def by_data(results: Results) -> list[list[Column]]:
    """A block of columns for each data set."""
    groups: dict[str, list[Column]] = {}
    for column in results.columns:
        groups.setdefault(column.parts[0], []).append(column)
    return list(groups.values())


def rows_of(block: Sequence[Column], results: Results, cells: Container[tuple[Row, Column]]) -> list[Row]:
    """The rows that have anything in a block."""
    return [row for row in results.rows if any((row, column) in cells for column in block)]


def markdown(results: Results, digits: int = 1) -> str:
    """Tables of GitHub's Markdown, one for each data set."""

    def apart(row: Row, column: Column) -> str:
        return points(results, row, column, digits)

    cell, lines = _marked(results, digits, "**{}**", "<u>{}</u>", str), []
    for block in by_data(results):
        lines += _markdown_grid(title(block), block, rows_of(block, results, results.cells), cell)
    lines += [*notes(results, ("bold", "underlined"), SOURCE), ""]
    if results.ours is not None and results.differences:
        for block in by_data(results):
            name = f"{results.ours.label} minus …, in {results.metric.points}: {title(block)}"
            lines += _markdown_grid(name, block, rows_of(block, results, results.differences), apart)
        lines += [" ".join(difference_notes(results)).replace("*", "\\*"), ""]
    return "\n".join([*lines, *(f"- {line}" for line in summary(results))]) + "\n"


def _marked(results: Results, digits: int, best: str, second: str, escaped: Callable[[str], str]) -> Written:
    """How a cell is written: its value, marked if it is the best or second of its column, then the paper's."""

    def cell(row: Row, column: Column) -> str:
        score = results.cells.get((row, column))
        value = escaped(written(score, results, digits))
        if score is None:
            return value
        value = {1: best, 2: second}.get(score.place or 0, "{}").format(value)
        return value if score.published is None else f"{value} ({results.metric.write(score.published, digits)})"

    return cell


def _markdown_grid(name: str, block: Sequence[Column], rows: Sequence[Row], of: Written) -> list[str]:
    heads = ["method", *(", ".join(heading(column, block)) for column in block)]
    lines = [heads, ["---"] * len(heads), *([row.label, *(of(row, column) for column in block)] for row in rows)]
    table = ["| " + " | ".join(map(_markdown_escaped, line)) + " |" for line in lines]
    return [f"**{_markdown_escaped(name)}**", "", *table, ""]


def _markdown_escaped(words: str) -> str:
    return words.replace("|", "\\|").replace("\n", " ")


def latex(results: Results, digits: int = 1) -> str:
    """A ``table`` environment for booktabs: a tabular for each data set, then one each for the differences."""

    def apart(row: Row, column: Column) -> str:
        return _tex(points(results, row, column, digits))

    cell = _marked(results, digits, "\\textbf{{{}}}", "\\underline{{{}}}", _tex)
    parts = [_tabular(block, rows_of(block, results, results.cells), cell, title(block)) for block in by_data(results)]
    caption = notes(results, ("Bold", "underlined"), SOURCE)
    if results.ours is not None and results.differences:
        for block in by_data(results):
            name = f"{results.ours.label} minus …: {title(block)}"
            parts.append(_tabular(block, rows_of(block, results, results.differences), apart, name))
        caption += ["Below,", *difference_notes(results)]
    body = "\n\n\\medskip\n".join(parts)
    lines = ["% needs \\usepackage{booktabs}", "\\begin{table}", "\\centering", body]
    return "\n".join([*lines, f"\\caption{{{_tex(' '.join(caption))}}}", "\\end{table}"]) + "\n"


def _tabular(block: Sequence[Column], rows: Sequence[Row], of: Written, name: str) -> str:
    heads = ["method", *(", ".join(heading(column, block)) for column in block)]
    lines = [
        f"\\begin{{tabular}}{{l{'r' * len(block)}}}",
        f"\\multicolumn{{{len(block) + 1}}}{{l}}{{{_tex(name)}}} \\\\",
        "\\toprule",
        " & ".join(map(_tex, heads)) + " \\\\",
        "\\midrule",
        *(" & ".join([_tex(row.label), *(of(row, column) for column in block)]) + " \\\\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines)


TEX = {
    "\\": r"\textbackslash{}", "&": r"\&", "%": r"\%", "$": r"\$", "#": r"\#", "_": r"\_", "{": r"\{", "}": r"\}",
    "~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "±": r"$\pm$", "–": "--", "<": r"$<$", ">": r"$>$",
    "[": "{[}", "]": "{]}", "…": r"\dots{}", "\n": " ",
}  # fmt: skip


def _tex(words: str) -> str:
    return "".join(TEX.get(letter, letter) for letter in words)


def as_csv(results: Results, digits: int = 1) -> str:
    """One line for each method and federation, all digits."""
    stream = io.StringIO()
    heads = "method,settings,data,data_sha256,partition,n_clients,alpha,metric,n_seeds,seeds,mean,std,place,paper"
    writer = csv.writer(stream, lineterminator="\n")
    apart_heads = "difference,low,high,p,p_holm,seeds_compared,interval_speaks_of"
    writer.writerow([*heads.split(","), *apart_heads.split(",")])
    for row in results.rows:
        for column in results.columns:
            cell, apart = results.cells.get((row, column)), results.differences.get((row, column))
            if cell is None:
                continue
            first = results.sheet.cells[row, column][0]
            seeds = " ".join(map(str, cell.seeds))
            line: list[Any] = [row.method, json.dumps(first.settings), column.data, first.data_sha256, column.partition]
            line += [column.n_clients, column.alpha, results.metric.name, len(cell.seeds), seeds]
            line += [cell.mean, cell.std, cell.place or None, cell.published]
            if apart is not None:
                line += [apart.value, apart.low, apart.high, apart.p, apart.p_holm, apart.n_seeds, apart.speaks_of]
            writer.writerow(line + [None] * (len(heads.split(",")) + 7 - len(line)))
    return stream.getvalue()


FORMATS: dict[str, Callable[[Results, int], str]] = {
    "terminal": text, "markdown": markdown, "latex": latex, "csv": as_csv
}  # fmt: skip
