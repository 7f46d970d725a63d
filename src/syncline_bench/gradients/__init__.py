"""``syncline bench gradients``: gradients that lie in their bucket's memory, beside copying them there and back.

``forms`` names the ways that are compared and what each has to move; ``iterations`` has their code, on the gradients of
``scattered``. ``request`` checks the request, ``gradient_ranks`` is what every process runs, and ``gradient_bench``
starts the processes and makes rows.
"""
