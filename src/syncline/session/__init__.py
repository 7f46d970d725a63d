"""A process in a run, and the groups in which it communicates.

``launch`` creates sessions; ``training``, ``serving``, the adapters in ``frameworks`` and ``torch_backend`` use them.
Start reading in ``session``: the group of all workers, with the strategy and the models. ``member`` is the process, its
end, and its place in a group. ``communicator`` is a group with its collectives; ``groups`` makes groups of some
workers. ``tickets`` has the common part of all calls: tickets, keys and calling threads. ``layout`` decides how a
model's tensors are exchanged, and ``printing`` prints the error that ends a run.
"""
