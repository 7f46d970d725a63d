"""Bells: what a ring ends, and what it does not touch."""

from __future__ import annotations

import os
import select
import threading

import pytest

from syncline.wire.bell import Bell, DescriptorBell

LIMIT_S = 20.0


@pytest.mark.parametrize("kind", [Bell, DescriptorBell])
def test_rings_before_a_wait_count_as_one(kind: type[Bell]) -> None:
    bell = kind()
    assert not bell.rang()
    assert not bell.wait(0.001)
    bell.ring()
    bell.ring()
    assert bell.wait(LIMIT_S)
    assert not bell.rang()


@pytest.mark.parametrize("kind", [Bell, DescriptorBell])
def test_a_ring_of_another_thread_ends_a_wait(kind: type[Bell]) -> None:
    bell = kind()
    thread = threading.Thread(target=bell.ring)
    thread.start()
    assert bell.wait(LIMIT_S)
    thread.join()


def test_a_descriptor_is_readable_after_a_ring_and_belongs_to_nobody_after_the_end() -> None:
    bell = DescriptorBell()
    assert select.select([bell], [], [], 0.0)[0] == []
    bell.ring()
    assert select.select([bell], [], [], LIMIT_S)[0] == [bell]
    bell.close()
    bell.close()
    assert bell.fileno() == -1
    other = os.eventfd(0, os.EFD_NONBLOCK)  # which usually gets the free number
    try:
        bell.ring()
        with pytest.raises(BlockingIOError):
            os.eventfd_read(other)
    finally:
        os.close(other)
