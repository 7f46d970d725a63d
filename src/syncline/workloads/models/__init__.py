"""Networks as torch modules: one file each, held to the published number of parameters by a test.

Beside them lies what belongs to no single one: initial weights (``fillers``), operations (``flops``), and the network
that only takes time (``replayed``).

Nothing is imported here, so that naming the folder does not import torch. Parameters are registered in the order in
which the forward pass meets them.
"""
