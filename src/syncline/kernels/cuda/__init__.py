"""Kernels of the codecs for tensors on a GPU, in Triton, with the payload bits of the Numba kernels.

``quantisers`` and ``sparse`` have the functions of the Numba files over torch tensors. Payloads are int32 where NumPy
has uint32. A count that Numba returns stays on the device as a tensor of one element, so that the host does not wait
for the GPU unless a docstring says so. ``blocks`` explains how the bits are kept equal; start reading there. Codecs
import from here.

The first kernel imports Triton. With ``TRITON_INTERPRET=1``, set before Triton is imported, the same kernels run on
tensors of the CPU, slowly.
"""

LARGEST_BLOCK = 1 << 15
"""Elements of the largest block, which a program keeps in registers."""
