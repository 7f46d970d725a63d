"""Networks as torch modules: one file each, held to the published number of parameters by a test.

Nothing is imported here, so that naming the folder does not import torch. Parameters are registered in the order in
which the forward pass meets them.
"""
