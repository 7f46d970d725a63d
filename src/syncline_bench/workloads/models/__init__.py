"""Models as torch modules: the ``networks``, their operations (``flops``), and one that only takes time (``replayed``).

This file imports nothing, so that importing the folder does not import torch.
"""
