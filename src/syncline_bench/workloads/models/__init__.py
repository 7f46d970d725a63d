"""Networks as torch modules: one file each; a test checks the published number of parameters.

Shared parts are in files of their own: initial weights (``fillers``), operation counts (``flops``), and the network
that only takes time (``replayed``).

This file imports nothing, so that importing the folder does not import torch. Parameters are registered in forward
order.
"""
