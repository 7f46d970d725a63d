"""``syncline bench collectives``: collectives over sizes, ranks, algorithms and transports, beside usual libraries.

Start with ``request``, which checks what to measure. ``collective_bench`` measures one number of ranks after the other
and keeps its results after every size. It starts ``ranks``, which run ``collective_ranks`` on one of the ``contenders``
(Syncline's own and the peers) or on the ``probes`` that measure the machine's limits. ``kinds`` defines each
collective: bandwidth factors, least traffic, inputs and expected results.

Every contender has a set of ranks of its own, which sleep until their turn. Turns are short and their order rotates, so
a busy moment of the machine hits all contenders alike.
"""
