"""The training of a model by several workers, the same for every framework: memory, buckets on their way, steps.

Knows no framework: tensors are flat arrays of the host, or whatever a framework's ``Staging`` copies from and to those.
A framework says when gradients are there, when its optimizer is called, and what an update is.
"""
