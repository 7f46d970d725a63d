"""Models as torch modules: the ``networks``, their operations (``flops``), and a network that only takes time
(``replayed``).

This file imports nothing, so that importing the folder does not import torch.
"""
