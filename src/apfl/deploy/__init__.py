"""A federation between machines, without the network: everything that travels is bytes made and checked here.

    site         a client: its rows stay on its disk, its statistics leave once, its model stays with it
    coordinator  the server: adds what arrives, publishes the primary stream, survives being killed
    terms        what all of them agreed to; its digest is in every message

A transport moves the bytes and nothing else; `apfl.deploy.inprocess` is the simplest one.
"""

from __future__ import annotations

from apfl.deploy.coordinator import Coordinator
from apfl.deploy.intake import Receipt
from apfl.deploy.leaving import Evidence
from apfl.deploy.publishing import Publication
from apfl.deploy.rows import WhatLeaves
from apfl.deploy.site import Site
from apfl.deploy.status import status_of
from apfl.deploy.terms import Terms

__all__ = ["Coordinator", "Evidence", "Publication", "Receipt", "Site", "Terms", "WhatLeaves", "status_of"]
