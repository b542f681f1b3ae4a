"""``apfl encoding``: one way to make numbers of words, dates and gaps, agreed on from sums alone."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from operator import add
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.progress import err, out
from apfl.data.tables import listed
from apfl.errors import InputError
from apfl.files import replacing

__all__ = ["describe", "settle"]

WITHHELD = 5  # rows of a category below which a site does not name it


def describe(
    data: Annotated[Path, typer.Argument(help="Table of one site: .csv, .tsv, .jsonl, also .gz, or .parquet.")],
    target: Annotated[Path, typer.Option("--out", help="File of the description, .json: this is what the site sends.")],
    label_column: Annotated[str, typer.Option(help="Label column, which is not described.")] = "label",
    features: Annotated[
        str | None, typer.Option(help="Columns to describe, separated by commas. \\[default: all but identifiers]")
    ] = None,
    drop: Annotated[str | None, typer.Option(help="Columns to leave out, separated by commas.")] = None,
    categories: Annotated[str, typer.Option(help="Columns whose numbers are names, separated by commas.")] = "",
    min_rows: Annotated[
        int, typer.Option(help="Do not name categories of fewer rows at this site; they are only counted.", min=1)
    ] = WITHHELD,
    test_column: Annotated[
        str | None, typer.Option(help="Column that is true where a row is for testing; these rows are left out.")
    ] = None,
) -> None:
    """Describe the columns of a site's table by sums: counts, sums, sums of squares, and the names of categories."""
    from apfl.data.columns import choose_features
    from apfl.data.tables import read_table
    from apfl.maths.encoding import summarise

    if not data.is_file():
        raise InputError(f"there is no {data}; give the table of a site")
    table = read_table(data)
    if test_column is not None:
        table = table.take(_training_rows(str(data), table, test_column))
        drop = ",".join(filter(None, (drop, test_column)))
    chosen = choose_features(data, table, label_column, features=features, drop=drop, encode="auto")
    named = [name.strip() for name in categories.split(",") if name.strip()]
    columns = {name: table.column(name).to_pylist() for name in chosen.numbers}
    described = summarise(columns, named, withhold=min_rows)
    _write(described.to_json(), target)
    words = sum(len(each.rows) for each in described.columns.values())
    out.print(
        f"{target}: rows ({described.n_rows}), gaps, sums and squares of {listed(list(columns), 60)}, and {words} "
        f"names of categories with their counts; those of fewer than {min_rows} rows are not named", soft_wrap=True,
        highlight=False,
    )  # fmt: skip


def _training_rows(name: str, table: Any, test_column: str) -> Any:
    """The places of rows that are not for testing, as `apfl run --test-column` tells them apart."""
    import numpy as np
    import torch

    from apfl.data.federation import Dataset
    from apfl.data.protocol import Protocol, halving
    from apfl.errors import unknown

    if test_column not in table.column_names:
        raise unknown(f"column in {name}", test_column, table.column_names)
    n, flags = table.num_rows, np.array(table.column(test_column).to_pylist())
    dataset = Dataset(name, torch.zeros(n, 1), torch.zeros(n, dtype=torch.long), ("all",), {test_column: flags})
    train, _ = halving(dataset, Protocol(test_column=test_column))(np.arange(n), np.random.default_rng(0))
    if not len(train):
        raise InputError(f"every row of {name} is for testing by column '{test_column}'; describe training rows")
    return train


def settle(
    descriptions: Annotated[list[Path], typer.Argument(help="Descriptions of all sites, .json.")],
    target: Annotated[Path, typer.Option("--out", help="File of the encoding, .json, for `--encode` at every site.")],
    min_rows: Annotated[int, typer.Option(help="Fewest rows of a category, over all sites.", min=1)] = 10,
    min_clients: Annotated[int, typer.Option(help="Fewest sites that have a category.", min=1)] = 2,
) -> None:
    """Add up the descriptions of all sites and settle the encoding. It names no site and holds no row."""
    from apfl.maths.encoding import Summary
    from apfl.maths.encoding import settle as settled_from

    sums = []
    for path in descriptions:
        try:
            sums.append(Summary.from_json(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, InputError) as error:
            raise InputError(f"{path} is no description of columns ({error})") from error
    _check_different(descriptions, [each.to_json() for each in sums])
    n_clients = sum(each.n_clients for each in sums)
    if n_clients < min_clients:
        raise InputError(
            f"descriptions of {n_clients} sites given, and a category is published if {min_clients} have it: with "
            "fewer sites nothing could be withheld. Give the descriptions of more sites, or --min-clients 1 if the "
            "names of one site's own categories may be known"
        )
    made = settled_from(reduce(add, sums), min_rows=min_rows, min_clients=min_clients)
    _write(made.to_json(), target)
    out.print(f"{len(made.feature_names)} features: {listed(made.feature_names, 60)}", soft_wrap=True, highlight=False)
    if made.left_out:
        err.print(
            f"left out, having one value or hardly any twice: {listed(list(made.left_out))}",
            soft_wrap=True,
            highlight=False,
        )
    out.print(
        f"next: give every site {target}, for example `apfl federate join --data site.csv --encode {target}`",
        soft_wrap=True,
    )


def _check_different(paths: Sequence[Path], told: Sequence[str]) -> None:
    """Refuse a site that would count twice: its rare categories would be those of several sites."""
    first = dict(zip(reversed(told), reversed(paths), strict=True))
    for path, own in zip(paths, told, strict=True):
        if first[own] is not path:
            raise InputError(
                f"{path} says the same as {first[own]}: each site counts once. Give one description of each site"
            )


def _write(text: str, target: Path) -> None:
    try:
        with replacing(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {target}: {error.strerror or error}; choose another --out") from error
