"""Which descriptions can be settled together: what one site describes keeps no other site out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from apfl.federate.terms import MOST_CLASSES, MOST_WEIGHTS, Description, Terms, of_one_width

__all__ = ["usable"]


def usable(draft: Terms, described: Sequence[Description]) -> tuple[list[Description], list[tuple[Description, str]]]:
    """The descriptions that can be settled together, and the others with the reason why each is left out."""
    kept, odd = of_one_width(draft, described)
    width = kept[0].n_features if kept else draft.n_features
    left_out = [
        (each, f"features of width {each.n_features}; most clients have {width}: use the same backbone") for each in odd
    ]
    while draft.class_names is None and len(kept) > 1 and len(_union(kept)) > (most := _most_classes(draft)):
        strangest = _strangest(kept)
        kept.remove(strangest)
        reason = (
            f"{len(strangest.class_names)} classes, with which the clients have more than {most} among them; no other "
            "client has so many that nobody else describes. State the classes in the terms of a new folder"
        )
        left_out.append((strangest, reason))
    return kept, left_out


def _most_classes(draft: Terms) -> int:
    """The most classes that a primary of the stated width may have; one of an open width has room for all allowed."""
    width = draft.method.d_primary
    return MOST_CLASSES if width == "auto" else min(MOST_CLASSES, MOST_WEIGHTS // int(width))


def _union(described: Sequence[Description]) -> set[str]:
    return {name for each in described for name in each.class_names}


def _strangest(described: Sequence[Description]) -> Description:
    """The description with most classes that no other has; of several such, the one with most classes."""
    clients = Counter(name for each in described for name in set(each.class_names))

    def strangeness(each: Description) -> tuple[int, int, str]:
        own = set(each.class_names)
        return sum(clients[name] == 1 for name in own), len(own), each.client

    return max(described, key=strangeness)
