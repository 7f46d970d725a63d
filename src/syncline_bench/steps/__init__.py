"""``syncline bench steps``: the time of a step beyond the plain framework's step and the exchange, for each framework.

``step_bench`` starts the ranks and makes rows, each rank runs ``step_ranks``, and ``loops`` has every framework's step.
"""
