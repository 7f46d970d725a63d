"""The hot loops of the codecs for tensors on a GPU, in Triton: the payload bits of the Numba kernels.

One file per family, beside the Numba file of the same name, whose functions it mirrors over torch tensors: payloads are
int32 where numpy has uint32, and a count that Numba returns stays on the device as a tensor of one element, so that
nobody waits for the GPU where the text does not say so. How the bits are kept equal is told in ``launch``.

Triton is asked for when the first kernel is, not before. With ``TRITON_INTERPRET=1``, set before Triton is imported,
the same kernels run on tensors of the CPU, slowly.
"""
