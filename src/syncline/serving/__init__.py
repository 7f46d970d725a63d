"""Parameter servers: the processes that own and update the weights, and how workers talk to them.

``training``, ``frameworks`` and the laws in ``testing`` import from here; no module here knows a framework. Start
reading in ``protocol``, the state machine of pushes and pulls. ``owner`` and ``server`` run it on the owners' side,
``owners`` is the workers' side; ``merged`` and ``single`` move gradients and weights between them, and ``shard`` has
the weights and the optimizer.
"""
