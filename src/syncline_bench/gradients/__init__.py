"""``syncline bench gradients``: gradients that are their bucket's memory, beside copying them together and back.

``forms`` names what is compared and says what each has to move, ``iterations`` is their code, on the gradients of
``scattered``; ``request`` checks what is asked for, ``rank`` is what every process runs, ``run`` starts them and makes
rows, and ``command`` is the verb. Ranks are started, and meet, as those of ``collectives`` do.
"""
