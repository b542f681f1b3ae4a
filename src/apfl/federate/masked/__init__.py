"""A federation whose server only ever sees sums: every message of a site goes through a masked sum.

    counts     rows and holders of each class over the cohort, and what a sum may reveal given them
    purposes   which sums there are, and the layout of each
    site       a site under masked terms: it answers rounds, and nothing else leaves it
    server     the server's side of one roster: rounds, and what their sums become
    inprocess  all of them in one process

The masked sums themselves are `apfl.federate.secure`. Here a vector of integers with its layout goes in at the site,
and the sum of such vectors comes out at the server: what the plain federation does with single vectors, this one does
with their sum.
"""
