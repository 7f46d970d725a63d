"""Names of element types: what numpy knows, bfloat16, and a sentence for what nobody can add."""

from __future__ import annotations

import pytest

from syncline.errors import UsageError
from syncline.nouns import numpy_dtype


@pytest.mark.parametrize(("name", "size"), [("float32", 4), ("float64", 8), ("float16", 2), ("bfloat16", 2)])
def test_types_that_can_be_added(name: str, size: int) -> None:
    assert (numpy_dtype(name).name, numpy_dtype(name).itemsize) == (name, size)


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2", "qint8"])
def test_a_type_that_cannot_be_added_is_refused_with_the_remedy(name: str) -> None:
    with pytest.raises(UsageError, match=f"elements of type {name} cannot be added, .*: keep these tensors as buffers"):
        numpy_dtype(name)
