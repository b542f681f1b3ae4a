"""Weights & Biases, offline: runs in a folder, for ``wandb sync``. Needs the ``wandb`` extra."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

from apfl.errors import optional
from apfl.files import replacing
from apfl.report.trackers import Run, folder_of


def send(runs: Sequence[Run], uri: str | None, project: str) -> Iterator[tuple[Run, bool]]:
    """Write an offline run for each record that the folder has none of; nothing leaves the machine."""
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    wandb = optional("wandb", "wandb")
    folder = folder_of(uri, ".")
    folder.mkdir(parents=True, exist_ok=True)
    for run in runs:
        artefact = folder / "apfl-records" / f"{run.key}.json"
        if artefact.exists():  # written last
            yield run, False
            continue
        quiet = wandb.Settings(silent=True, console="off", x_disable_stats=True, x_disable_machine_info=True)
        with wandb.init(
            project=project, id=run.key, name=run.name, dir=str(folder), mode="offline", config=run.parameters,
            settings=quiet, reinit="finish_previous",
        ) as started:  # fmt: skip
            for step, point in enumerate(run.curve, 1):
                started.log({f"curve/{key}": value for key, value in point.items()}, step=step)
            started.summary.update(run.metrics)
            record = wandb.Artifact(f"record-{run.key}", type="record")
            with record.new_file("record.json", mode="w") as file:
                file.write(run.record)
            started.log_artifact(record)
        with replacing(artefact) as temporary:
            temporary.write_text(run.record)
        yield run, True
