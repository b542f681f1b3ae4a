"""Differential privacy between machines: noisy sums and what follows from them are released, and accounted.

    agreement  what terms with epsilon must state, so that nothing else depends on anyone's rows
    entropy    noise from the system's entropy
    landmarks  the centred map, as every site gets it
    plausible  whether a site's integers can be those of its rows, at a server that is trusted and adds the noise
    shares     a site's part of a masked sum with its share of the noise, and the site's own account
    account    what was released, in the server's ledger: charged before it is known, and never twice
    publishing the primary of a noisy sum

With `noise="central"` sites send sums to a server that they trust, and it adds noise once to each sum that it
publishes. With `noise="shares"` each site adds its share of the noise inside the masks, and no server sees less of it.
"""
