"""What a setting of a method means and may be, in words: for `apfl methods`.

`MEANINGS` has the settings that many methods share. The comment beside a field is shown too, also that of your own
method.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_type_hints

from pydantic import TypeAdapter

from apfl.methods import Method

__all__ = ["MEANINGS", "Setting", "settings_of"]

MEANINGS = {
    "activation": "activation of the random map",
    "activation_primary": "activation of the primary map",
    "activation_refinement": "activation of the refinement map",
    "adapt": "how a client adapts the shared model",
    "balance": "weight of the refinement stream (lambda)",
    "batch": "rows of a gradient step",
    "beta": "ridge of the private stream",
    "block_ridge": "ridge of each block",
    "blocks": "number of blocks",
    "components": "Gaussians for each class",
    "d": "width of the random map",
    "d_primary": "width of the primary map; auto: by the number of rows",
    "d_refinement": "width of the refinement map; auto: that of the primary map",
    "epochs": "passes over a client's rows",
    "eta": "step size of the weights that mix the shared and the own head",
    "every": "rounds between two choices of personal weights",
    "finetune_epochs": "passes over a client's rows after the last round",
    "finetune_lr": "learning rate of the fine-tuning",
    "gamma": "ridge of the shared stream, or of the only one",
    "intercept": "append a column of ones to the maps",
    "limit": "largest share of personal weights",
    "lr": "learning rate",
    "momentum": "share of the new mean in the running mean of representations",
    "map": "random map, or landmarks",
    "mu": "pull towards the broadcast model",
    "n_rounds": "exchanges between server and clients",
    "normalise": "how features are scaled first",
    "pull": "pull of the private head towards the shared one",
    "rate": "share of the weights that become personal at each choice",
    "refinement": "residuals that the refinement is fitted to",
    "sample": "share of a client's rows that the mixture is fitted to",
    "scope": "whose left-out rows choose: everyone's, or the client's own",
    "shrinkage": "weight of the identity in the covariance",
    "smoothing": "added to the label counts behind the local prior",
    "tau": "weight of the local prior, or temperature",
    "weight_decay": "of Adam",
}


@dataclass(frozen=True)
class Setting:
    """One field of a method."""

    name: str
    default: str
    allowed: str
    meaning: str


def settings_of(cls: type[Method]) -> list[Setting]:
    """The settings of a method, in their order."""
    hints, comments = get_type_hints(cls, include_extras=True), _comments(cls)
    return [
        Setting(
            each.name,
            "required" if each.default is MISSING else str(each.default),
            _allowed(hints[each.name]),
            "; ".join(filter(None, (MEANINGS.get(each.name), comments.get(each.name)))),
        )
        for each in fields(cls)
    ]


def _comments(cls: type[Method]) -> dict[str, str]:
    """The comments beside the fields, those of the class over those that it inherits."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        if not issubclass(each, Method) or each is Method:
            continue
        try:
            lines = textwrap.dedent(inspect.getsource(each)).splitlines()
            (body,) = ast.parse("\n".join(lines)).body
        except (OSError, TypeError, SyntaxError, ValueError):  # made in a prompt, or without its source
            continue
        assert isinstance(body, ast.ClassDef), "the source of a class is a class"
        for node in body.body:
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                comment = lines[(node.end_lineno or 1) - 1].partition("  # ")[2]
                found[node.target.id] = comment.partition(" (`")[0]  # what follows names a module
    return found


def _allowed(hint: Any) -> str:
    """What a value may be.

    >>> from typing import Literal
    >>> _allowed(int | Literal["auto"]), _allowed(bool)
    ('a whole number or auto', 'true or false')
    """
    try:
        return _in_words(TypeAdapter(hint).json_schema())
    except Exception:  # a type of your own, which pydantic may not describe
        return str(getattr(hint, "__name__", hint))


def _in_words(schema: Mapping[str, Any]) -> str:
    if "anyOf" in schema:
        return " or ".join(map(_in_words, schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return ", ".join(map(str, schema.get("enum", [schema.get("const")])))
    kinds = {"integer": "a whole number", "number": "a number", "boolean": "true or false", "string": "a text"}
    kinds["null"] = "nothing"
    bounds = [
        f"{sign} {schema[key]}"
        for key, sign in (("exclusiveMinimum", ">"), ("minimum", ">="), ("exclusiveMaximum", "<"), ("maximum", "<="))
        if key in schema
    ]
    return f"{kinds.get(str(schema.get('type')), 'see its source')} {' and '.join(bounds)}".strip()
