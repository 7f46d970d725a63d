"""``syncline bench``: collectives over sizes, ranks, algorithms and transports, beside what one would use instead.

From the request to the rows: ``request`` says what is to be measured and refuses what makes no sense; ``run`` goes
through it, number of ranks by number of ranks, and keeps what it has after every size; ``start`` starts a set of ranks
and listens to it; ``rank`` is what each rank executes, on the ``contenders`` (Syncline's own and the peers), with the
``probes`` that measure the limits between them. ``kinds`` holds what the collectives mean: factors, least traffic,
inputs and expected results.

All contenders that can be in one process are in the same processes and take turns: every repetition measures each of
them once, in an order that rotates, so that a busy moment of the machine hits all alike.
"""
