"""``apfl stats``: the sums of a site of any size, shard by shard; and ``apfl stats add``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from apfl.cli.executors import OnOption, SlurmOption, executor_of
from apfl.cli.options import TABLE, data_options
from apfl.cli.progress import Counter, end_as_interrupted, err, out
from apfl.data.source import Source
from apfl.data.tables import listed
from apfl.errors import InputError
from apfl.maths.machine import n_cores

if TYPE_CHECKING:
    from apfl.data.executors import Executor
    from apfl.federate.stats.parts import Part
    from apfl.federate.terms import Terms

__all__ = ["add", "sum"]

OutOption = Annotated[Path, typer.Option("--out", help="File of the part, .safetensors. It stays at the site.")]


@data_options(only=TABLE)
def sum(
    shards: Annotated[list[Path], typer.Argument(help="Files of rows: .parquet, .npz, .npy, .csv, .tsv, also .gz.")],
    terms: Annotated[
        Path, typer.Option(help="Terms of the federation; they say which sums are made. See `apfl federate join`.")
    ],
    target: OutOption,
    landmarks: Annotated[
        Path | None,
        typer.Option(help="Landmarks of settled terms. \\[default: beside the terms]", show_default=False),
    ] = None,
    share: Annotated[
        float, typer.Option(help="Share of the rows to use, if the terms let a site contribute fewer than it has.")
    ] = 1.0,
    on: OnOption = "local",
    jobs: Annotated[
        int | None, typer.Option(help="Shards at a time, each in a process of its own.", show_default=False, min=1)
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(
            help="Threads for a shard; they decide the last digits. \\[default: one for each core of this machine]",
            show_default=False,
            min=1,
        ),
    ] = None,
    slurm: SlurmOption = None,
    *,
    source: Source,
) -> None:
    """Sum up the rows of shards, in memory that does not grow with them. The default: `apfl stats SHARD...`.

    Under an invitation: rows of each class and the moments of features. Under an
    outline: the moments that landmarks are drawn from. Under settled terms: the
    statistics. If it is interrupted or killed, run the same command again.
    """
    from apfl.federate.stats.passes import Pass, pass_bytes
    from apfl.federate.stats.stages import stage_of

    agreed = _terms(terms)
    stage = stage_of(agreed, _landmarks(agreed, terms, landmarks))
    given = {option: vars(source)[option] for option in TABLE}
    end_as_interrupted()
    if on != "local" or jobs is not None or slurm:
        executor = executor_of(
            on, target.absolute().with_name(f"{target.name}.jobs"), n_workers=jobs, threads=threads or n_cores(),
            slurm=slurm,
        )  # fmt: skip
        _tell(
            _summed_on(executor, agreed, _landmarks(agreed, terms, landmarks), shards, target, given, share, threads),
            target,
        )
        return
    with Counter("rows", 0) as counter:
        run = Pass(stage, shards, target, given, share, show=counter.show, n_threads=threads)
        if agreed.n_features:
            parquet = any(path.suffix.lower() == ".parquet" for path in shards)
            megabytes = pass_bytes(agreed, agreed.n_features, parquet=parquet) / 1e6
            err.print(f"memory: about {megabytes:.0f} MB, whatever the number of rows", highlight=False)
        try:
            part = run.run()
        except KeyboardInterrupt:
            counter.progress.stop()
            err.print(_stopped(run.unfinished, len(run.done)), soft_wrap=True, highlight=False)
            raise typer.Exit(130) from None
    _tell(part, target)


def _summed_on(
    executor: Executor, agreed: Terms, landmarks: bytes | None, shards: list[Path], target: Path,
    given: dict[str, Any], share: float, threads: int | None,
) -> Part:  # fmt: skip
    """The part of all shards, by the processes of an executor."""
    from apfl.federate.stats.spread_out import summed_on

    with Counter("shards", len(shards)) as counter:
        try:
            return summed_on(
                executor, agreed, landmarks, shards, target, given, share, threads or n_cores(), counter.show
            )
        except KeyboardInterrupt:
            counter.progress.stop()
            err.print("stopped; the parts of finished shards are kept, and the same command goes on", soft_wrap=True)
            raise typer.Exit(130) from None


def add(
    parts: Annotated[list[Path], typer.Argument(help="Parts that `apfl stats` made, of other shards each.")],
    target: OutOption,
) -> None:
    """Add parts, in any order to the same bytes. A shard that is in two of them is refused."""
    from apfl.federate.stats.parts import add_parts, read_part, stage_in, write_part

    stage = stage_in(parts[0])
    part = add_parts((str(path), read_part(path, stage)) for path in parts)
    write_part(part, target)
    _tell(part, target)


def _terms(path: Path) -> Terms:
    from apfl.federate.terms import Terms

    if not path.is_file():
        raise InputError(f"there is no file {path}")
    return Terms.from_json(path.read_bytes())


def _landmarks(agreed: Terms, terms: Path, given: Path | None) -> bytes | None:
    """The landmarks that settled terms name: in the file given, or beside the terms, as a site keeps them."""
    if not agreed.settled or not agreed.landmarked:
        return None
    beside = [
        terms.with_name(f"landmarks-{(agreed.landmarks_sha256 or '')[:32]}.safetensors"),
        terms.with_name("landmarks.safetensors"),
    ]
    path = next((each for each in ([given] if given else beside) if each.is_file()), None)
    if path is None:
        raise InputError(
            f"no landmarks in {given or terms.parent}; name the file that came with the terms: --landmarks"
        )
    return path.read_bytes()


def _stopped(unfinished: Path, n_done: int) -> str:
    if not unfinished.is_file():
        return "stopped; no shard was finished yet, nothing is kept"
    return (
        f"stopped; {unfinished} has the sums of {n_done} finished shard{'s' * (n_done > 1)}; the same command goes on"
    )


def _tell(part: Part, target: Path) -> None:
    """What a part is, and what is not in it."""
    n = len(part.shards)
    rows = f"{part.n_samples:,} rows of {n} shard{'s' * (n > 1)}"
    out.print(f"{part.stage.kind} of {rows}: {target}", soft_wrap=True, highlight=False)
    few = f"fewer than {part.stage.terms.min_per_class} rows so far"
    for why, classes in ((few, part.withheld), ("not a class of the federation", part.unknown)):
        if classes:
            told = listed([f"{name} ({n})" for name, n in classes.items()])
            err.print(f"not in it, {why}: {told}", soft_wrap=True, highlight=False)
