"""A site with more rows than memory: its sums are made a shard at a time, and added.

    stages   what a pass over the rows sums up, which follows from the terms: description, moments, statistics
    parts    the sums of some shards as a file; parts add, in any order and grouping, to the same bytes
    passes   a pass over files of rows, which can be killed and goes on
    spread_out   a pass by many processes or machines
    site     a client whose messages are made from parts

A part stays at the site and is not rounded. What leaves is rounded once, by `StreamedSite`.
"""
