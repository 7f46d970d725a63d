"""``syncline bench gradients``: gradients that lie in their bucket's memory, beside copying them there and back.

``gradient_cases`` has the forms that are compared, what each has to move, and the checked request; ``iterations`` has
the code of every form. ``gradient_ranks`` is what every process runs, and ``gradient_bench`` starts the processes and
makes rows.
"""
