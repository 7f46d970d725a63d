"""Cost models: networks as constants, what a plan costs on one, and how long a training iteration takes.

Choices at run time (``tuning``) and predictions (``syncline_bench.predict``) import from here; nothing here touches a
socket, a file or the real clock. Start reading in ``cluster`` (the constants), then ``plans`` (one exchange) and
``iteration`` (a whole iteration, on the virtual clock of ``clock``).
"""
