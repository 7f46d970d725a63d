"""``syncline bench steps``: what a step takes beyond the bare framework's and the exchange's, framework by framework.

``step_bench`` starts the ranks and makes rows, ``step_ranks`` is what each rank runs, and ``loops`` has a step of every
framework.
"""
