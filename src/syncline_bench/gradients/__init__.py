"""``syncline bench gradients``: gradients that lie in their bucket's memory, next to copying them there and back.

``gradient_cases`` has the compared forms, the data that each has to move, and the checked request; ``iterations`` has
the code of every form. Every process runs ``gradient_ranks``, and ``gradient_bench`` starts them and makes rows.
"""
