"""The memory in which an owner receives what each worker pushes: of its own part only, and no two in one place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from syncline.serving.single import rooms


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50), st.sampled_from(["f2", "f4", "f8"])), min_size=1),
    st.integers(0, 5),
)
def test_parts_of_workers_lie_side_by_side(shapes: list[tuple[int, int, str]], workers: int) -> None:
    asked: list[int] = []

    def allocate(nbytes: int, dtype: Any) -> Any:
        asked.append(nbytes)
        return np.zeros(nbytes, dtype)

    session: Any = SimpleNamespace(engine=SimpleNamespace(allocate=allocate))
    arrays = [np.zeros(start + size + 3, dtype) for start, size, dtype in shapes]
    mine = [slice(start, start + size) for start, size, _ in shapes]
    found = rooms(session, arrays, mine, workers)
    for worker, room in enumerate(found):
        for number, (array, part) in enumerate(zip(room, mine, strict=True)):
            assert (array.shape, array.dtype) == (arrays[number].shape, arrays[number].dtype)
            array[part] = 1 + worker * len(arrays) + number
    for worker, room in enumerate(found):
        for number, (array, part) in enumerate(zip(room, mine, strict=True)):
            assert (array[part] == 1 + worker * len(arrays) + number).all()
    owned = sum(array[part].nbytes for array, part in zip(arrays, mine, strict=True))
    whole = sum(array.nbytes for array in arrays)
    assert sum(asked) <= 1 + whole + workers * owned + 64 * (workers + 1) * len(arrays)
