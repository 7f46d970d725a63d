"""Owns the training of a model by several workers, for all frameworks: its memory, its exchanges and its steps.

It depends on no framework. Tensors are flat arrays on the host, or device tensors that a framework's ``Staging`` copies
to and from such arrays. A framework reports complete gradients and calls of its optimizer, and defines an update.
"""
