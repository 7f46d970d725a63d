"""Cost models: networks as constants, the cost of a plan on a network, and the time of a training iteration.

Choices at run time (``tuning``) and predictions (``syncline_bench.predict``) import from here; nothing here touches a
socket, a file or the real clock. Start reading in ``cluster`` (the constants), then ``plans`` (one exchange) and
``iteration`` (a whole iteration, on the virtual clock of ``clock``).
"""
