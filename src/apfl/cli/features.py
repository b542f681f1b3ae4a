"""``apfl features``, and the extraction that ``apfl run --backbone`` begins with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from apfl.cli.progress import Counter, err, out
from apfl.data import Samples, open_source
from apfl.data.backbones import load_backbone
from apfl.data.extract.features import Extraction, cached_file, extract
from apfl.data.federation import Dataset
from apfl.data.samples import vectors
from apfl.data.sources.features import load as load_features
from apfl.errors import InputError

__all__ = ["features", "load_data"]

BackboneOption = Annotated[
    str | None,
    typer.Option(
        help="Network that makes features of images: vit-mae-base, dinov2-small, clip-vit-b32, efficientnet-lite0, "
        "identity (for vectors), owner/name on the Hub, or a folder with a model.",
        show_default=False,
    ),
]
PoolingOption = Annotated[
    str | None,
    typer.Option(help="Pooling: cls or mean. Presets have a default; other models need one.", show_default=False),
]
RevisionOption = Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hub dataset.", show_default=False)]
BackboneRevisionOption = Annotated[
    str | None, typer.Option(help="Branch, tag or commit of a Hub model.", show_default=False)
]
ImageColumnOption = Annotated[str | None, typer.Option(help="Image column of a Hub dataset.", show_default=False)]
LabelColumnOption = Annotated[
    str | None, typer.Option(help="Label column of a Hub dataset, CSV or Parquet file.", show_default=False)
]
FeatureColumnOption = Annotated[
    str | None,
    typer.Option(help="Vector column of a CSV or Parquet file, or prefix of its numbered columns.", show_default=False),
]
SplitsOption = Annotated[
    str | None,
    typer.Option(
        help="Official splits of a Hub dataset to pool, separated by commas. \\[default: all]", show_default=False
    ),
]
OnCorruptOption = Annotated[str, typer.Option(help="Action on unreadable images: refuse or skip.")]
OnCorruptChoice = Annotated[  # where a plan or a record has its own
    str | None, typer.Option(help="Action on unreadable images: refuse or skip.", show_default=False)
]
BatchSizeOption = Annotated[
    int | None, typer.Option(help="Samples per batch. \\[default: 16 on a CPU, else 128]", show_default=False)
]


def features(
    data: Annotated[str, typer.Argument(help="Dataset name or path, as for `apfl run --data`.")],
    backbone: BackboneOption = None,
    target: Annotated[
        Path | None,
        typer.Option("--out", help="Features file (.npz) to write. \\[default: in the cache]", show_default=False),
    ] = None,
    pooling: PoolingOption = None,
    revision: RevisionOption = None,
    backbone_revision: BackboneRevisionOption = None,
    splits: SplitsOption = None,
    image_column: ImageColumnOption = None,
    label_column: LabelColumnOption = None,
    feature_column: FeatureColumnOption = None,
    on_corrupt: OnCorruptOption = "refuse",
    batch_size: BatchSizeOption = None,
    device: Annotated[
        str, typer.Option(help="Device: auto (a GPU if there is one), cpu, cuda, cuda:N or mps.")
    ] = "auto",
    mixed_precision: Annotated[bool, typer.Option(help="Use mixed precision (bfloat16) in the network.")] = False,
) -> None:
    """Extract features from images with a frozen backbone, and keep them in a file.

    If the file is up to date, nothing is extracted. After an interruption, the same command resumes.
    """
    if backbone is None:
        raise InputError("no backbone given; name one with --backbone, for example --backbone vit-mae-base")
    if target is not None and target.suffix != ".npz":
        raise InputError(f"--out {target} given; the file is an .npz: give it that ending")
    opened = _open(data, revision, splits, image_column, label_column, feature_column)
    result = _extract(
        opened, backbone, pooling, backbone_revision, target,
        on_corrupt=on_corrupt, batch_size=batch_size, device=device, mixed_precision=mixed_precision,
    )  # fmt: skip
    state = "up to date, nothing extracted" if not result.n_computed else f"{result.n_computed} extracted now"
    out.print(f"features of {result.n_rows} samples: {result.path} ({state})", soft_wrap=True, highlight=False)


def load_data(
    data: str,
    backbone: str | None,
    *,
    pooling: str | None = None,
    revision: str | None = None,
    backbone_revision: str | None = None,
    splits: str | None = None,
    image_column: str | None = None,
    label_column: str | None = None,
    feature_column: str | None = None,
    on_corrupt: str = "refuse",
    device: str = "auto",
) -> Dataset:
    """Vectors as they are; images through the backbone, or from the cache."""
    opened = _open(data, revision, splits, image_column, label_column, feature_column)
    if isinstance(opened, Dataset):
        if backbone not in (None, "identity"):
            raise InputError(f"'{data}' holds features already; leave --backbone {backbone} out")
        if pooling or backbone_revision:
            raise InputError(f"'{data}' holds features already; leave --pooling and --backbone-revision out")
        return opened
    if backbone is None:
        raise InputError(f"'{data}' holds images; name the backbone that makes features of them with --backbone")
    result = _extract(opened, backbone, pooling, backbone_revision, None, on_corrupt=on_corrupt, device=device)
    name = f"{opened.name}-{backbone if not Path(backbone).is_dir() else Path(backbone).resolve().name}"
    return replace(load_features(result.path), name=name)


def _open(
    data: str,
    revision: str | None,
    splits: str | None,
    image_column: str | None,
    label_column: str | None,
    feature_column: str | None,
) -> Dataset | Samples:
    names = None if splits is None else [name.strip() for name in splits.split(",")]
    return open_source(
        data, revision=revision, splits=names,
        image_column=image_column, label_column=label_column, feature_column=feature_column,
    )  # fmt: skip


def _extract(
    opened: Dataset | Samples,
    backbone: str,
    pooling: str | None,
    backbone_revision: str | None,
    target: Path | None,
    **options: Any,
) -> Extraction:
    samples = vectors(opened) if isinstance(opened, Dataset) else opened
    network = load_backbone(backbone, pooling=pooling, revision=backbone_revision)
    path = target or cached_file(samples, network, mixed_precision=options.get("mixed_precision", False))
    try:
        with Counter(f"{samples.name} through {network.name}", len(samples)) as counter:
            result = extract(samples, network, path, on_progress=counter.show, **options)
    except KeyboardInterrupt:
        err.print("stopped; run the same command again to resume.")
        raise typer.Exit(130) from None
    for where, why in result.skipped.items():
        err.print(f"skipped {where}: {why}", style="yellow", highlight=False, soft_wrap=True)
    return result
