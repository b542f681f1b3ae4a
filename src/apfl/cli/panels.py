"""How the options of a long ``--help`` are grouped, so that it can be read at 80 columns."""

from __future__ import annotations

import click
from typer.core import TyperCommand

__all__ = ["PANELS", "PanelCommand"]

# The fields of `Source`, which needs torch and is therefore not imported; a test compares.
DATA = "data backbone pooling revision backbone_revision splits image_column text_column label_column target "
DATA += "feature_column features drop encode categories on_corrupt"
DEALT = "clients alpha partition client_column test_column group_column test_fraction minimum classes_per_client"

# By command and panel, the names of parameters; others are under "Options".
PANELS: dict[str, dict[str, str]] = {
    "run": {"Data": DATA, "Federation": DEALT, "Methods": "methods seeds settings tune device n_threads"}
    | {"Output": "folder save help"},
    "bench": {
        "Data": DATA,
        "Federation": "clients alpha partition minimum client_column test_column",
        "Methods": "methods seeds rounds",
    }
    | {"Output": "folder jobs threads device dry_run help"},
    "rerun": {"Data": DATA, "Record": "method seed clients alpha device help"},
    "features": {"Data": DATA.replace(" target", ""), "Output": "target batch_size device mixed_precision help"},
    "federate server": {"Connection": "name host port secure"}
    | {
        "Terms": "quorum min_cohort min_per_class max_rows max_share wire classes n_features masked seed settings",
        "Storage": "keep_contributions help",
    },
    "federate join": {"Connection": "server name ca key insecure patience"}
    | {
        "Data": "data statistics label_column feature_column features drop encode "
        "test_column test_fraction group_column",
    }
    | {"What leaves": "terms roster identity show yes min_per_class contribute rejoin report", "Output": "folder help"},
}


class PanelCommand(TyperCommand):
    """A command whose options are shown in the panels of its name."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """The parameters; the options with their panels, in the panels' order."""
        panels = PANELS.get(ctx.command_path.partition(" ")[2], {})
        panel_of = {name: panel for panel, names in panels.items() for name in names.split()}
        params = super().get_params(ctx)
        for each in params:
            if isinstance(each, click.Option) and each.name in panel_of:
                each.rich_help_panel = panel_of[each.name]  # type: ignore[attr-defined]
        order = [None, *panels]
        return sorted(params, key=lambda each: order.index(getattr(each, "rich_help_panel", None)))
