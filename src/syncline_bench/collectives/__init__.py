"""``syncline bench``: collectives over sizes, ranks, algorithms and transports, beside what one would use instead.

From the request to the rows: ``request`` says what is to be measured and refuses what makes no sense; ``run`` goes
through it, number of ranks by number of ranks, and keeps what it has after every size; ``start`` starts a set of ranks,
gives it orders and listens to it; ``rank`` is what each rank executes, on one of the ``contenders`` (Syncline's own and
the peers), or with the ``probes`` that measure the limits. ``kinds`` holds what the collectives mean: factors, least
traffic, inputs and expected results.

Every contender has a set of ranks of its own, which sleep until it is their turn. Turns are short and their order
rotates, so that a busy moment of the machine hits all alike.
"""
