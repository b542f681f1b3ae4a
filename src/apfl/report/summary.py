"""What a table says, in sentences."""

from __future__ import annotations

from collections.abc import Callable

from apfl.report.caveats import unmeasured
from apfl.report.compare import FEW_SEEDS
from apfl.report.results import Metric, Results
from apfl.report.sheet import Column, Row

__all__ = ["difference_notes", "notes", "p_text", "summary"]

ROUNDS = 200  # of the gradient methods in the paper
FEW = 30  # below, percentile intervals of a bootstrap cover less than they say


def summary(results: Results) -> list[str]:
    """One sentence for each federation, after one that counts them; it says where our method is behind, and last
    whether the others were trained for fewer rounds than the paper's."""
    return [*_standings(results), *_short_training(results)]


def _short_training(results: Results) -> list[str]:
    trained = sorted({record.settings["n_rounds"] for record in results.sheet.all if "n_rounds" in record.settings})
    if not trained or trained[0] >= ROUNDS:
        return []
    rounds = f"{trained[0]}" if len(trained) == 1 else f"{trained[0]} to {trained[-1]}"
    return [f"The gradient methods were trained for {rounds} round{'s' * (trained != [1])}; the paper has {ROUNDS}."]


def _standings(results: Results) -> list[str]:
    ours = results.ours
    if ours is None or not results.differences:
        return [_leader(results, column) for column in results.columns]
    standings = [sentence for column in results.columns if (sentence := _standing(results, ours, column))]
    return standings if len(standings) == 1 else [_count(results, ours), *standings]


def _count(results: Results, ours: Row) -> str:
    """In how many federations ours is ahead, and by how much on average."""
    margins = [
        _sign(results) * _gap(results, ours, rival, column)
        for column in results.columns
        if (rival := _best_other(results, ours, column)) is not None and (ours, column) in results.cells
    ]
    ahead = sum(margin > 0 for margin in margins)
    mean = sum(margins) / len(margins)
    metric = results.metric
    return (
        f"{ours.label} is ahead of the best of the others in {ahead} of {len(margins)} federations; "
        f"on average over all of them it is {_far(metric, mean)} {'ahead' if mean >= 0 else 'BEHIND'}. "
        f"{_how_many(results, ours)}."
    )


def _far(metric: Metric, gap: float) -> str:
    """A distance in words.

    >>> from apfl.report.results import METRICS
    >>> _far(METRICS["accuracy_client_mean"], -0.0123), _far(METRICS["rmse_client_mean"], 1.234)
    ('1.2 points', 'an RMSE of 1.23')
    """
    return f"{metric.apart(abs(gap))[1:]} points" if metric.percent else f"an {metric.points} of {abs(gap):.3g}"


def _how_many(results: Results, ours: Row) -> str:
    """How many others there are to be ahead of."""
    here = [len(_others(results, ours, c)) for c in results.columns if (ours, c) in results.cells]
    few, many = min(here), max(here)
    return f"There are {few} others in each" if few == many else f"There are {few} to {many} others in each"


def _sign(results: Results) -> int:
    return 1 if results.metric.higher_is_better else -1


def _others(results: Results, ours: Row, column: Column) -> list[Row]:
    return [row for row in results.rows if row is not ours and row.competes and (row, column) in results.cells]


def _gap(results: Results, ours: Row, rival: Row, column: Column) -> float:
    """Ours minus the rival's: on the seeds both have, where that is known, as the interval beside it is."""
    difference = results.differences.get((rival, column))
    if difference is not None:
        return difference.value
    return results.cells[ours, column].mean - results.cells[rival, column].mean


def _best_other(results: Results, ours: Row, column: Column) -> Row | None:
    return max(
        _others(results, ours, column), key=lambda row: _sign(results) * results.cells[row, column].mean, default=None
    )


def _standing(results: Results, ours: Row, column: Column) -> str | None:
    rival = _best_other(results, ours, column)
    if rival is None or (ours, column) not in results.cells:
        return None
    own, theirs = results.cells[ours, column], results.cells[rival, column]
    write = results.metric.write
    gap = _sign(results) * _gap(results, ours, rival, column)
    unit = " %" if results.metric.percent else ""
    where = f"{write(own.mean)}{unit}, {rival.label} {write(theirs.mean)}{unit}"
    far = _far(results.metric, gap)
    standing = "level with" if abs(gap) < 1e-11 else f"{far} {'ahead of' if gap > 0 else 'BEHIND'}"
    difference = results.differences.get((rival, column))
    how_sure = ""
    if difference is not None:
        verdict = "clear" if difference.clear else "not clear"
        common = f", on the {_seeds(difference.n_seeds)} both have" if set(own.seeds) != set(theirs.seeds) else ""
        how_sure = (
            f"; 95 % interval {results.metric.apart(difference.low)} to {results.metric.apart(difference.high)} "
            f"({difference.speaks_of}), "
            f"Holm {p_text(difference.p_holm)}: {verdict}{common}"
        )
    about = f"{where}; {_seeds(len(own.seeds))}{how_sure}"
    n = len(_others(results, ours, column))
    rivals = "the only other method" if n == 1 else f"the best of {n} others"
    return f"{column.label}: {ours.label} is {standing} {rivals} ({about})."


def _leader(results: Results, column: Column) -> str:
    here = [row for row in results.rows if row.competes and (row, column) in results.cells]
    best = max(here, key=lambda row: _sign(results) * results.cells[row, column].mean, default=None)
    if best is None:
        return f"{column.label}: nothing was measured."
    cell, metric = results.cells[best, column], results.metric
    unit = " %" if metric.percent else " s" if metric.name == "seconds" else ""
    return f"{column.label}: {best.label} is first of {len(here)} with {metric.write(cell.mean)}{unit} " + (
        f"({_seeds(len(cell.seeds))})."
    )


def _seeds(n: int) -> str:
    return f"{n} seed" if n == 1 else f"{n} seeds"


def p_text(value: float | None) -> str:
    """An adjusted p-value as it is written in a sentence."""
    return "p not known" if value is None else f"p = {value:.3f}" if value >= 0.001 else "p < 0.001"


def notes(results: Results, marks: tuple[str, str], source: str) -> list[str]:
    """How to read the table: metric, round, seeds, marks, and what was tuned."""
    lines = [_measured(results), f"{marks[0]}: best of its column; {marks[1]}: second best."]
    if results.has_published:
        lines.append(
            f"In brackets, the paper's value: {source}. Another backbone than ours: it compares methods, not numbers."
        )
    return [*lines, *_notes_on_rows(results), *_warnings(results)]


def _measured(results: Results) -> str:
    """The metric, and over which seeds."""
    metric, seeds = results.metric, results.usual_seeds
    how_many = f"{_seeds(len(seeds))} ({', '.join(map(str, seeds))})"
    if any(cell.seeds != seeds for cell in results.cells.values()):
        how_many += " unless n= says otherwise"
    several = any(len(cell.seeds) > 1 for cell in results.cells.values())
    spread = f"Mean ± standard deviation over {how_many}." if several else f"{how_many}: no spread over seeds is known."
    return f"{metric.name}, {metric.unit}: {metric.says}. The last round is what is reported. {spread}"


def _notes_on_rows(results: Results) -> list[str]:
    """Whose settings were found on test rows, tuned, or not the same everywhere."""

    def labels(chosen: Callable[[Row], bool]) -> str:
        return ", ".join(row.label for row in results.rows if chosen(row))

    lines = []
    if oracles := labels(lambda row: not row.competes):
        lines.append(f"Settings that are best on the test rows, for each seed: {oracles}. It does not compete.")
    if tuned := labels(results.sheet.tuned):
        lines.append(f"Tuned on a part of the training rows: {tuned}.")
    if differing := labels(results.sheet.differs_between_columns):
        lines.append(f"Settings differ between columns: {differing}.")
    return lines


def _warnings(results: Results) -> list[str]:
    """What the numbers cannot say."""
    lines = []
    devices = sorted({record.device for record in results.sheet.all})
    if len(devices) > 1 and results.metric.name == "seconds":
        lines.append(f"Measured on different devices ({', '.join(devices)}): times do not compare.")
    lines += [f"{_where(results, column)}{missing}" for column, missing in _unmeasured(results).items()]
    if any(each.n_seeds == 1 and each.n_clients < FEW for each in results.differences.values()):
        lines.append(f"With one seed and fewer than {FEW} clients, intervals are too narrow.")
    if results.why_no_differences:
        lines.append(f"{results.why_no_differences}.")
    return lines


def _unmeasured(results: Results) -> dict[Column, str]:
    """For each federation, the clients that its means are without."""
    found = {
        column: unmeasured(record for own in results.sheet.records(column).values() for record in own)
        for column in results.columns
    }
    return {column: missing for column, missing in found.items() if missing}


def _where(results: Results, column: Column) -> str:
    return f"{column.label}: " if len(results.columns) > 1 else ""


def difference_notes(results: Results) -> list[str]:
    """How to read the differences: what they are, what their intervals speak of, and the star."""
    ours = "ours" if results.ours is None else results.ours.label
    compared = {each.n_seeds for each in results.differences.values()}
    seeds = _seeds(results.usual_compared) + (" unless n= says otherwise" if len(compared) > 1 else "")
    lines = [
        f"difference: {ours} minus the method, in {results.metric.points} [95 % interval], on the seeds that both "
        f"have: {seeds}."
    ]
    if max(compared) > 1:
        lines.append("The interval speaks of other seeds and other clients.")
    if any(1 < n < FEW_SEEDS for n in compared):
        lines.append(f"Fewer than {FEW_SEEDS} seeds are few: the interval is wide, as they say little of their spread.")
    if 1 in compared:
        lines.append("With one seed the interval speaks of other clients only, not of other seeds.")
    star = "*: clear at 5 % after Holm over the methods of a column; without it the order is not settled."
    return [*lines, star]
