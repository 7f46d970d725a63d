"""Buffers that are used again, and what is said when there is no memory for one."""

from __future__ import annotations

import pytest

from syncline.errors import SynclineError
from syncline.wire.scratch import Scratch


def test_a_buffer_that_was_given_back_is_taken_again() -> None:
    scratch = Scratch()
    buffer = scratch.take(5000)
    assert buffer.nbytes == 8192 == scratch.allocated_bytes
    scratch.give(buffer)
    assert scratch.take(8192) is buffer
    assert scratch.take(8192) is not buffer


@pytest.mark.parametrize("nbytes", [1 << 50, 1 << 62, 1 << 63, 1 << 64])
def test_memory_that_is_not_there_is_a_sentence(nbytes: int) -> None:
    scratch = Scratch()
    with pytest.raises(SynclineError, match=f"no memory for {nbytes} bytes"):
        scratch.take(nbytes)
    assert scratch.allocated_bytes == 0
