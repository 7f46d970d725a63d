"""Tensors in nobody's framework, as owners of weights hand them over, and back."""

from __future__ import annotations

import pytest
import torch

from syncline.frameworks.torch.partial_optimizer import as_elements, as_tensor
from syncline.frameworks.torch.storage import as_bytes, dtype_name
from syncline.serving.records import ITEM_BYTES, Record, Slice, pack, unpack

DTYPES = [
    dtype
    for dtype in sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
    if not dtype_name(dtype).startswith(("q", "bits"))
]


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
@pytest.mark.filterwarnings("ignore:BComplex32 support is experimental")
@pytest.mark.parametrize("dtype", DTYPES, ids=dtype_name)
@pytest.mark.parametrize("shape", [(), (0,), (5,), (2, 3)])
def test_a_tensor_of_any_type_comes_back(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    assert ITEM_BYTES[dtype_name(dtype)] == dtype.itemsize
    before = torch.empty(shape, dtype=dtype)
    as_bytes(before).copy_(torch.arange(before.nbytes, dtype=torch.uint8))
    record = Record(Slice(0, 0, 5), "key", as_elements(before))
    (found,) = unpack(pack([record]), "rank 1", 1)
    after = as_tensor(found.value)  # type: ignore[arg-type]
    assert (after.dtype, after.shape) == (before.dtype, before.shape)
    assert torch.equal(as_bytes(after), as_bytes(before))


def test_elements_are_in_the_order_of_the_tensors_shape() -> None:
    """However they lie, a single one included; what is contiguous is not copied."""
    before = torch.arange(12.0).reshape(3, 4)
    assert torch.equal(as_tensor(as_elements(before.t())), before.t())
    assert torch.equal(as_tensor(as_elements(before[1:2, 1:2])), before[1:2, 1:2])
    as_tensor(as_elements(before)).zero_()
    assert not before.any()
