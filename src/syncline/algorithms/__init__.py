"""Algorithms: group -> plan, one file per idea, pure arithmetic on ranks.

An algorithm is a function registered with the goal of its plan (``allreduce``, ``reduce_scatter``, ``all_gather`` or
``broadcast``) that takes a Group, and keyword-only options that a strategy text may give. Whether its plan is right is
proved by ``plans.check`` for every group the tests can think of; how fast it is on which network is the simulator's
question. Nothing here knows about bytes, transports or clocks.

In the costs: n bytes, N workers, a s per message, b s per byte, g s per byte reduced, one full-duplex port per rank,
lg = ceil(log2 N).
"""
