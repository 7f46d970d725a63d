"""Staging memory: used again, shared by small buffers, and given back when it lies idle."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator

import numpy as np
import pytest

from syncline.errors import SynclineError
from syncline.transports import Bytes
from syncline.transports import shm as module
from syncline.transports.shm import Segments, map_segment, staging_size

MIB = 1 << 20


@pytest.fixture
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[Segments]:
    """Segments of a process that keeps 1 MiB of idle memory."""
    monkeypatch.setattr(module, "IDLE_BYTES", MIB)
    made = Segments()
    yield made
    made.close()


def take(segments: Segments, nbytes: int) -> Bytes:
    """Staging memory as the transport takes it."""
    found = segments.staging(nbytes)
    return segments.cut(segments.create(segments.segment_for(nbytes))[2], nbytes) if found is None else found


def held(segments: Segments) -> int:
    """The bytes of memory that the kernel has given to the segments."""
    return sum(512 * os.fstat(fd).st_blocks for fd in segments.fds)


def test_idle_memory_is_bounded_whatever_was_used(segments: Segments) -> None:
    for size in range(MIB // 2, 9 * MIB, MIB // 2):
        staging = take(segments, size)
        assert staging.nbytes >= size
        staging[:] = 7
        segments.free(staging)
        assert held(segments) <= MIB


def test_what_a_peer_may_still_have_to_map_has_no_holes(segments: Segments) -> None:
    segments.known = 1
    used = [take(segments, 2 * MIB) for _ in range(2)]
    for staging in used:
        segments.free(staging)
    assert held(segments) == 2 * MIB
    map_segment(segments.fds[1], 2 * MIB)
    segments.known = 2
    segments.free(take(segments, 4096))
    assert held(segments) == 4096


def test_what_is_in_use_stays(segments: Segments) -> None:
    used = [take(segments, MIB) for _ in range(4)]
    for number, staging in enumerate(used):
        staging[:] = number
    segments.free(take(segments, 4 * MIB))
    assert held(segments) == 4 * MIB
    assert all((staging == number).all() for number, staging in enumerate(used))


def test_memory_that_was_given_back_is_used_again_by_those_who_have_mapped_it(segments: Segments) -> None:
    staging = take(segments, 2 * MIB)
    theirs = map_segment(segments.fds[0], staging.nbytes)
    for value in (1, 2):
        staging[:] = value
        assert (theirs == value).all()
        segments.free(staging)
        assert held(segments) == 0
        assert take(segments, 2 * MIB) is staging
        assert held(segments) == 2 * MIB
    assert len(segments.fds) == 1


def test_a_machine_without_memory_gives_a_clear_error_and_loses_nothing(
    segments: Segments, monkeypatch: pytest.MonkeyPatch
) -> None:
    staging = take(segments, 2 * MIB)
    segments.free(staging)

    def full(fd: int, offset: int, nbytes: int) -> None:
        raise OSError(errno.ENOSPC, f"no room for {nbytes} at {offset} of {fd}")

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        for nbytes in (2 * MIB, 4 * MIB):
            with pytest.raises(SynclineError, match=f"shared segment of {nbytes} bytes .*use fewer ranks"):
                take(segments, nbytes)
    assert take(segments, 2 * MIB) is staging


def test_many_small_buffers_share_few_segments(segments: Segments) -> None:
    used = [take(segments, 100) for _ in range(2000)]
    assert len(segments.fds) < 20
    assert held(segments) <= 2 * sum(staging.nbytes for staging in used)
    for number, staging in enumerate(used):
        staging[:] = number % 251
    assert all((staging == number % 251).all() for number, staging in enumerate(used))
    places = [segments.find(staging.ctypes.data, staging.nbytes) for staging in used]
    assert len(set(places)) == len(used)


def test_sizes_are_powers_of_two() -> None:
    sizes = np.array([staging_size(nbytes) for nbytes in (0, 1, 4096, 4097, MIB, MIB + 1)])
    assert sizes.tolist() == [4096, 4096, 4096, 8192, MIB, 2 * MIB]
