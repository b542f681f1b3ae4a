"""``apfl table``, ``plot``, ``report`` and ``track``: records as something to look at."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import Progress

from apfl.cli.options import names_of
from apfl.cli.progress import err, out
from apfl.errors import InputError, unknown
from apfl.experiments.record import Record
from apfl.files import replacing
from apfl.report import TITLE
from apfl.report.figures import FIGURES
from apfl.report.formats import FORMATS, terminal
from apfl.report.pareto import PARETO_FORMATS, pareto_terminal
from apfl.report.results import METRICS, results
from apfl.report.sheet import Sheet, gather, read
from apfl.report.trackers import send

__all__ = ["plot", "report", "table", "track"]

RecordsArgument = Annotated[
    list[Path],
    typer.Argument(help="Records: records.jsonl files, single records (.json), or folders of `apfl run` or `bench`."),
]
AgainstOption = Annotated[
    str | None,
    typer.Option(help="Method (or row) to compare the others with. \\[default: apfl]", show_default=False),
]
MethodsOption = Annotated[
    str | None, typer.Option(help="Keep only these methods, separated by commas.", show_default=False)
]
FederationOption = Annotated[
    str | None,
    typer.Option(help="Keep only federations whose name contains this, for example 'alpha 0.1'.", show_default=False),
]
MetricOption = Annotated[
    str | None,
    typer.Option(
        help=f"Metric: {', '.join(METRICS)}. \\[default: accuracy_client_mean, of numbers rmse_client_mean, of several "
        "labels map_client_mean]",
        show_default=False,
    ),
]


def table(
    paths: RecordsArgument,
    style: Annotated[str, typer.Option("--format", help="Format: terminal, markdown, latex or csv.")] = "terminal",
    target: Annotated[
        Path | None, typer.Option("--out", help="File to write. \\[default: standard output]", show_default=False)
    ] = None,
    metric: MetricOption = None,
    methods: MethodsOption = None,
    federation: FederationOption = None,
    against: AgainstOption = None,
    digits: Annotated[int, typer.Option(help="Digits after the decimal point.", min=0, max=4)] = 1,
    pareto: Annotated[
        bool,
        typer.Option("--pareto", help="Accuracy, bytes and exchanges instead, and which methods no other one beats."),
    ] = False,
) -> None:
    """Print records as a table: methods by federations, mean and spread over seeds, differences with intervals.

    Only records that differ in nothing but their seed are averaged. All results are those of the final round.
    """
    if style not in FORMATS:
        raise unknown("format", style, FORMATS)
    sheet = gather(_chosen(paths, methods, federation))
    if pareto:
        _front(sheet, style, target, digits, metric)
        return
    compared = results(sheet, metric, against)
    if style == "terminal" and target is None:
        out.print(terminal(compared, out.width, digits))
    else:
        _deliver(FORMATS[style](compared, digits), target)


def _front(sheet: Sheet, style: str, target: Path | None, digits: int, metric: str | None) -> None:
    first = sheet.headline.metric
    if metric not in (None, first):
        raise InputError(f"--pareto with --metric {metric} given; it compares {first}: leave --metric out")
    if style == "terminal" and target is None:
        out.print(pareto_terminal(sheet, digits))
        return
    if style not in PARETO_FORMATS:
        raise InputError(f"--pareto with --format {style} given; it has: {', '.join(PARETO_FORMATS)}")
    _deliver(PARETO_FORMATS[style](sheet, digits), target)


def _deliver(text: str, target: Path | None) -> None:
    if target is None:
        sys.stdout.write(text)
        return
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    err.print(f"wrote {target}", soft_wrap=True, highlight=False)


def plot(
    paths: RecordsArgument,
    name: Annotated[
        str | None, typer.Option("--figure", help=f"Figure: {', '.join(FIGURES)}.", show_default=False)
    ] = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", help="File to write: .png, .svg or .pdf. \\[default: FIGURE.png]", show_default=False),
    ] = None,
    x: Annotated[
        str | None, typer.Option("--x", help="Setting on the x axis, for figure sensitivity.", show_default=False)
    ] = None,
    methods: MethodsOption = None,
    federation: FederationOption = None,
    against: AgainstOption = None,
) -> None:
    """Draw a figure from records, with markers and lines that can be told apart without colour.

    Without --figure, lists the figures and what each shows.
    """
    if name is None:
        for each, shows in FIGURES.items():
            out.print(f"--figure {each:<12} {shows}", soft_wrap=True, highlight=False)
        return
    target = target or Path(f"{name}.png")
    from apfl.report.figures.draw import figure  # matplotlib takes its time; the other commands need not wait for it
    from apfl.report.figures.style import save

    sheet = gather(_chosen(paths, methods, federation))
    save(figure(name, sheet, results(sheet, against=against).ours, x), target)
    err.print(f"wrote {target}", soft_wrap=True, highlight=False)


def report(
    paths: RecordsArgument,
    target: Annotated[Path, typer.Option("--out", help="HTML file to write.")] = Path("report.html"),
    title: Annotated[str, typer.Option(help="Title of the page.")] = TITLE,
    methods: MethodsOption = None,
    federation: FederationOption = None,
    against: AgainstOption = None,
) -> None:
    """Write one HTML page from records: summary, sortable tables, curves, clients, settings. It opens offline."""
    from apfl.report.page import page

    records = _chosen(paths, methods, federation)
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        task = progress.add_task("drawing", total=None)
        text = page(
            records,
            against=against,
            title=title,
            on_federation=lambda done, of: progress.update(task, completed=done, total=of),
        )
    with replacing(target) as temporary:
        temporary.write_text(text, encoding="utf-8")
    err.print(f"wrote {target} ({len(text) / 1e6:.1f} MB)", soft_wrap=True, highlight=False)


def track(
    paths: RecordsArgument,
    to: Annotated[str, typer.Option(help="Tracker: mlflow, or wandb (offline: nothing leaves this machine).")],
    uri: Annotated[
        str | None,
        typer.Option(
            help="MLflow server or sqlite:///FILE; for wandb, the folder of its offline runs. "
            "\\[default: sqlite:///mlflow.db; for wandb, the current folder]",
            show_default=False,
        ),
    ] = None,
    project: Annotated[str, typer.Option(help="MLflow experiment or wandb project.")] = "apfl",
) -> None:
    """Send records to an experiment tracker: parameters, metrics, the curve by round, the record as an artefact.

    Records that the tracker already has are not sent again.
    """
    records, new = read(paths), 0
    with Progress(console=err, transient=True, disable=not err.is_terminal) as progress:
        for _, sent in progress.track(send(records, to, uri, project), total=len(records), description="sending"):
            new += sent
    err.print(f"{new} of {len(records)} records were new to {to}", soft_wrap=True, highlight=False)


def _chosen(paths: list[Path], methods: str | None, federation: str | None) -> list[Record]:
    """The records that are asked for."""
    records = read(paths) if methods is None else _of_methods(read(paths), methods)
    return records if federation is None else _of_federation(records, federation)


def _of_methods(records: list[Record], methods: str) -> list[Record]:
    have = sorted({record.method for record in records})
    wanted = names_of(methods, have)
    for name in wanted:
        if name not in have:
            raise unknown("method in these records", name, have)
    return [record for record in records if record.method in wanted]


def _of_federation(records: list[Record], federation: str) -> list[Record]:
    sheet = gather(records)
    kept = [column for column in sheet.columns if federation in column.label]
    if not kept:
        labels = "; ".join(column.label for column in sheet.columns)
        raise InputError(f"no federation has '{federation}' in its name (have: {labels})")
    return [record for column in kept for cell in sheet.records(column).values() for record in cell]
