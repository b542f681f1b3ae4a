"""``apfl features``, and the extraction that ``apfl run --backbone`` begins with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.executors import OnOption, SlurmOption, executor_of
from apfl.cli.options import EVERY, DeviceOption, data_options
from apfl.cli.progress import Counter, err, out
from apfl.data.backbones import Backbone
from apfl.data.device import device_of
from apfl.data.extract.features import Extraction, extract
from apfl.data.extract.shards import InShards
from apfl.data.load import Source, extract_source
from apfl.data.samples import Samples
from apfl.errors import InputError

__all__ = ["extract_aloud", "features"]

BatchSizeOption = Annotated[
    int | None,
    typer.Option(
        help="Samples per batch. \\[default: 16 images or 256 texts on a CPU, 128 or 1024 on a GPU]", show_default=False
    ),
]


@data_options(argument=True, only=[name for name in EVERY if name != "target"])
def features(
    source: Source,
    target: Annotated[
        Path | None,
        typer.Option("--out", help="Features file (.npz) to write. \\[default: in the cache]", show_default=False),
    ] = None,
    batch_size: BatchSizeOption = None,
    device: DeviceOption = "auto",
    mixed_precision: Annotated[
        bool, typer.Option(help="Use mixed precision in the network: float16 on a GPU, bfloat16 on a CPU.")
    ] = False,
    workers: Annotated[
        int | None,
        typer.Option(
            help="Processes that decode images. \\[default: on a GPU, one for each core but one; on a CPU, threads]",
            show_default=False,
        ),
    ] = None,
    on: OnOption = "local",
    jobs: Annotated[
        int | None, typer.Option(help="Shards at a time with --on ray or slurm.", show_default=False, min=1)
    ] = None,
    threads: Annotated[
        int | None, typer.Option(help="Threads for each shard with --on ray or slurm.", show_default=False, min=1)
    ] = None,
    slurm: SlurmOption = None,
) -> None:
    """Extract features from images or texts with a frozen backbone, and keep them in a file.

    If the file is up to date, nothing is extracted. After an interruption, the
    same command resumes. With --on ray or slurm, machines of a cluster extract
    shards of rows, and the file is the same.
    """
    if source.backbone is None:  # said before anything is opened, which may mean a download
        raise InputError("no backbone given; name one with --backbone, for example --backbone vit-mae-base")
    if target is not None and target.suffix != ".npz":
        raise InputError(f"--out {target} given; the file is an .npz: give it that ending")
    options: dict[str, Any] = {"extract": extract_aloud, "workers": workers}
    if on != "local" or slurm or jobs or threads:
        gpu = device_of(device).type == "cuda"
        folder = (target or Path("features.npz")).with_name(".jobs")
        executor = executor_of(on, folder, n_workers=jobs, threads=threads or 1, gpu=gpu, slurm=slurm)
        if on == "local":
            raise InputError(
                "--jobs or --threads given with --on local, where one process uses all cores: leave it out"
            )
        if target is None:
            raise InputError(f"--on {on} given; name a file that all machines see with --out")
        options["passing"] = InShards(executor, source, target.absolute())
    result = extract_source(
        source, source.open(), target,
        batch_size=batch_size, device=device, mixed_precision=mixed_precision, **options,
    )  # fmt: skip
    state = "up to date, nothing extracted" if not result.n_computed else f"{result.n_computed} extracted now"
    out.print(f"features of {result.n_rows} samples: {result.path} ({state})", soft_wrap=True, highlight=False)


def extract_aloud(samples: Samples, network: Backbone, path: Path, **options: Any) -> Extraction:
    """`extract`, with a counter and a line for each sample that was skipped."""
    try:
        with Counter(f"{samples.name} through {network.name}", len(samples)) as counter:
            result = extract(samples, network, path, on_progress=counter.show, **options)
    except KeyboardInterrupt:
        err.print("stopped; run the same command again to resume.")
        raise typer.Exit(130) from None
    for where, why in result.skipped.items():
        err.print(f"skipped {where}: {why}", style="yellow", highlight=False, soft_wrap=True)
    if result.n_cut:
        limit = network.preprocessing.get("max_length")
        err.print(
            f"{result.n_cut} of {result.n_rows} texts have more than the {limit} tokens that {network.name} reads; the "
            "rest of them was cut off", style="yellow", highlight=False, soft_wrap=True,
        )  # fmt: skip
    return result
