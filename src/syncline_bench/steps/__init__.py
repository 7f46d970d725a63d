"""``syncline bench steps``: what a step takes beyond the bare framework's and the exchange's, framework by framework.

``run`` starts the ranks and makes rows, ``rank`` is what each of them runs, ``loops`` says what a framework has to do,
and ``_numpy``, ``_jax`` and ``_torch`` do it; ``command`` is the verb.
"""
