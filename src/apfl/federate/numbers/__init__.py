"""A federation whose targets are columns: numbers, or several labels.

Every site sends sums on one wide map (a constant, the standardised features, landmarks) and is sent everyone's sum. It
solves the shared ridges from that itself, and leaves its own rows out exactly. What is to be chosen for all is chosen
in stages, each from sums over the sites: the likeliest ridges, the shares of the models, and for labels the thresholds.
A site's model is the average that `apfl.methods._numbers` makes, to the last digits.

    shared       everyone's sum with its maps: primaries, and the plain ridge
    messages     moments, the publication, the tables of the stages, what was chosen
    server       publishes, and chooses stage by stage
    site         a client
"""
