"""``syncline explain``: why a run is as slow as it is, from its timeline, its results or its flight record.

``reading`` reads a timeline's file back. ``activity`` finds the iterations of its ranks, the time of their stages, the
exchanges and the links. ``causes`` judges them, ``path`` follows an iteration back through all ranks, and ``changes``
predicts what would be faster. ``results`` explains result files, and ``flights`` explains flight records.
"""
