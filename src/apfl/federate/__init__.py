"""A federation between machines, without the network: everything that travels is bytes made and checked here.

    site         a client: its rows stay on its disk, its statistics leave once, its model stays with it
    coordinator  the server: adds what arrives, publishes the primary stream, survives being killed
    terms        what all of them agreed to; its digest is in every message

A transport moves the bytes and nothing else; `apfl.federate.inprocess` is the simplest one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from apfl.errors import names_in

if TYPE_CHECKING:
    from apfl.federate.coordinator import Coordinator
    from apfl.federate.disclosure import WhatLeaves
    from apfl.federate.intake import Receipt
    from apfl.federate.leaving import Evidence
    from apfl.federate.publishing import Publication
    from apfl.federate.site import Site
    from apfl.federate.status import status_of
    from apfl.federate.terms import Terms

# Where each name lives. They are imported when first used, as those of `apfl` are: Flower's own processes
# (`flower.superlink`, `flower.supernode`) need no torch.
HOMES = {
    "coordinator": "Coordinator",
    "intake": "Receipt",
    "leaving": "Evidence",
    "publishing": "Publication",
    "disclosure": "WhatLeaves",
    "site": "Site",
    "status": "status_of",
    "terms": "Terms",
}

__all__ = ["Coordinator", "Evidence", "Publication", "Receipt", "Site", "Terms", "WhatLeaves", "status_of"]


__getattr__ = names_in(__name__, HOMES)
