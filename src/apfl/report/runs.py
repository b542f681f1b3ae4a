"""`apfl.run`: what the command `apfl run` does, from Python, with results to look at and models to use."""

from __future__ import annotations

import html
import re
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from apfl.data.device import float64_device
from apfl.data.given import dataset_and_protocol
from apfl.data.load import Source, source_of
from apfl.data.protocol import Protocol
from apfl.errors import InputError, optional, unknown
from apfl.experiments.metrics import no_test_rows
from apfl.experiments.record import Record
from apfl.experiments.seeds import seeds_of
from apfl.experiments.study import DEFAULT_METHODS, Study, chosen_methods, execute, leave_no_empty, model_folder, tuned
from apfl.files import replacing
from apfl.maths import machine
from apfl.methods import Method
from apfl.models.file import load_model
from apfl.report import TITLE
from apfl.report.formats import FORMATS
from apfl.report.results import results
from apfl.report.sheet import gather
from apfl.report.terminal import heads_of, results_caption, results_lines, results_table, results_title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from apfl.models.base import ClientModel

__all__ = ["RunResults", "run"]


class RunResults:
    """The records of a run, and the models that it wrote to ``folder``.

    Without ``out`` the folder is a temporary one, which is removed together with this object. A run without test rows
    has no records, only models; ``trained`` then names the clients of each method and seed.

    >>> results = run("digits", ["afl", "local_ridge"], clients=5, seeds=1)
    >>> [record.method for record in results.records]
    ['afl', 'local_ridge']
    >>> results.model("afl", client=3)
    DualStream(primary (64, 10), balance 0, 10 classes)
    """

    def __init__(
        self, records: Sequence[Record], folder: Path, trained: Mapping[tuple[str, int], Sequence[str]] | None = None
    ) -> None:
        self.records, self.folder = list(records), folder
        self._clients = {(each.method, each.seed): each.client_names for each in records} or dict(trained or {})

    def table(
        self,
        style: str = "terminal",
        *,
        metric: str | None = None,
        against: str | None = None,
        digits: int = 1,
    ) -> str:
        """The table of `apfl table` as text: mean and spread over seeds, differences with their intervals.

        ``style`` is terminal, markdown, latex or csv; ``against`` is the method that the others are compared with.
        """
        if style not in FORMATS:
            raise unknown("style", style, FORMATS)
        return FORMATS[style](results(gather(self._measured()), metric, against), digits)

    def to_frame(self) -> Any:
        """A pandas DataFrame with a row for each method and seed, and all fields of the records as columns."""
        return optional("pandas", "hub").DataFrame([asdict(record) for record in self._measured()])

    def plot(
        self,
        figure: str = "clients",
        out: str | Path | None = None,
        *,
        x: str | None = None,
        against: str | None = None,
    ) -> Figure:
        """A figure of `apfl plot`, by default every client's accuracy, RMSE or mAP; with ``out``, also as a file."""
        from apfl.report.figures import draw, style  # matplotlib takes its time

        sheet = gather(self._measured())
        drawn = draw.figure(figure, sheet, results(sheet, against=against).ours, x)
        if out is not None:
            style.save(drawn, Path(out))
        return drawn

    def report(self, out: str | Path = "report.html", *, against: str | None = None, title: str = TITLE) -> Path:
        """Write the page of `apfl report`, which opens offline; the path of the file."""
        from apfl.report.page import page  # draws, with matplotlib

        text = page(self._measured(), against=against, title=title)
        with replacing(Path(out)) as temporary:
            temporary.write_text(text, encoding="utf-8")
        return Path(out)

    def model(self, method: str, client: int | str = 0, seed: int | None = None) -> ClientModel:
        """One client's model, of the first seed unless ``seed`` is given; ``client`` is its place or its name."""
        own = {each: names for (name, each), names in self._clients.items() if name == method}
        if not own:
            raise unknown("method in these results", method, {name for name, _ in self._clients})
        seed = next(iter(own)) if seed is None else seed
        if seed not in own:
            raise InputError(f"seed {seed} given; these results have {', '.join(map(str, own))}")
        place = _place(client, own[seed])
        # The file's name may go on with the client's.
        files = model_folder(self.folder, method, seed).glob(f"client-{place}*.safetensors")
        file = next((each for each in files if re.match(rf"client-{place}\D", each.name)), None)
        if file is None:
            raise InputError(f"there is no model of {method} in {self.folder}; run with save_models=True")
        return load_model(file)

    def _measured(self) -> list[Record]:
        if not self.records:
            raise InputError(
                "these results have no records: there were no test rows to measure on. Use their models with .model(), "
                "or keep test rows back with test_fraction"
            )
        return self.records

    def __repr__(self) -> str:
        if not self.records:
            return f"RunResults(no test rows, so no records; models in {self.folder})"
        first = self.records[0].headline
        unit = " %" if first.percent else f" {first.word}"
        scores = ", ".join(f"{line[0]} {line[1]}{unit}" for line in results_lines(self.records))
        return f"RunResults({results_title(self.records)}: {scores})"

    def __str__(self) -> str:
        if not self.records:
            return repr(self)
        console = Console(width=100, color_system=None, emoji=False)
        with console.capture() as captured:
            console.print(results_table(self.records), markup=True)
        return "\n".join(line.rstrip() for line in captured.get().splitlines())

    def _repr_html_(self) -> str:
        """For notebooks: the table of `apfl run`."""
        if not self.records:
            return f"<p>{html.escape(repr(self))}</p>"
        heads, *lines = [["method", *heads_of(self.records)], *results_lines(self.records)]
        rows = [_html_row("th", heads), *(_html_row("td", line) for line in lines)]
        title, caption = (html.escape(of(self.records)) for of in (results_title, results_caption))
        return f"<table><caption>{title}</caption>{''.join(rows)}</table><p><small>{caption}</small></p>"


def _place(client: int | str, names: Sequence[str]) -> int:
    if isinstance(client, str):
        if client not in names:
            raise unknown("client", client, names)
        return list(names).index(client)
    if not 0 <= client < len(names):
        raise InputError(f"client {client} given; there are {len(names)}: give 0 to {len(names) - 1}, or a name")
    return client


def _html_row(tag: str, cells: Iterable[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{html.escape(cell)}</{tag}>' for cell in cells)}</tr>"


def run(
    data: Any = "digits",
    methods: str | Method | type[Method] | Iterable[str | Method | type[Method]] = DEFAULT_METHODS,
    *,
    labels: Any = None,
    clients: Any = None,
    alpha: float = Protocol.alpha,
    partition: str | Callable[..., Any] | None = None,
    seeds: int | Sequence[int] = 3,
    settings: Mapping[str, Mapping[str, Any]] | None = None,
    tune: bool = False,
    out: str | Path | None = None,
    save_models: bool = True,
    device: str = "auto",
    threads: int | None = None,
    client_column: str | None = None,
    test_column: str | None = None,
    group_column: str | None = None,
    test_fraction: float = Protocol.test_fraction,
    minimum: int | None = None,
    classes_per_client: int = Protocol.classes_per_client,
    on_record: Callable[[Record], None] = lambda record: None,
    **options: Any,
) -> RunResults:
    """Run methods on one federation: `apfl run`, with the same arguments, defaults and records.

    ``data``, ``labels`` and ``options`` are those of `apfl.load_data`: a name or path, arrays, a DataFrame, a
    `Federation`. ``methods`` are names, paths, or methods of your own as objects or classes; ``settings`` are theirs,
    for example ``{"apfl": {"balance": 0.3}}``. ``clients`` is their number, or the client of each row. ``partition`` is
    a name, a path or a function. ``seeds=3`` is three seeds, 0, 1 and 2; a list names them. With ``out``, records and
    models are kept in that folder, as the command keeps them. ``test_fraction=0`` trains on all rows and leaves models
    alone, in ``out``. ``threads`` is the number of threads of torch and BLAS, by default theirs; records have it, since
    another number may change the last digits. ``on_record`` is called with each record once it is done.

    >>> run("digits", ["afl"], clients=4, seeds=1)
    RunResults(digits: 4 clients, dirichlet, alpha 0.1, seeds 0: afl ... %)
    """
    chosen = chosen_methods([methods] if isinstance(methods, str | Method | type) else list(methods), settings or {})
    seed_list, where = seeds_of(seeds), float64_device(device)
    dataset, protocol = dataset_and_protocol(
        data, labels, clients, alpha, partition, client_column, test_column, group_column, test_fraction, minimum,
        classes_per_client, device, **options,
    )  # fmt: skip
    named = isinstance(data, str | Path | Source) and labels is None
    source = source_of(data, options).changed() if named else {}
    folder = Path(tempfile.mkdtemp(prefix="apfl-")) if out is None else Path(out)
    study = Study(dataset, protocol, chosen, seed_list, folder, where, save_models, source)
    try:
        if out is None and not study.measured:  # the models, all that there would be, go with the temporary folder
            raise no_test_rows()
        records = []
        with machine.threads(threads):
            for record in execute(tuned(study) if tune else study):
                on_record(record)
                records.append(record)
    except BaseException:
        if out is None:
            shutil.rmtree(folder, ignore_errors=True)
        leave_no_empty(folder)
        raise
    trained = {(name, seed): each.names for seed, each in study.federations.items() for name in chosen}
    outcome = RunResults(records, folder, trained)
    if out is None:
        weakref.finalize(outcome, shutil.rmtree, folder, ignore_errors=True)
    return outcome
