"""Input pipelines: what loading and copying last, and a thread that works ahead but no further."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing
from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from syncline.errors import UsageError
from syncline.nouns import Seconds
from syncline_bench.workloads import Feed, Pipeline

LIMIT_S = 60.0


class Clock:
    """A clock that a pause moves."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        return self.at

    def pause(self, seconds: float) -> None:
        self.at += seconds


def source(clock: Clock, takes_s: float) -> Iterator[int]:
    for number in count():
        clock.at += takes_s
        yield number


@pytest.mark.parametrize(("takes_s", "lasts_s"), [(0.0, 5.0), (2.0, 5.0), (7.0, 7.0)])
def test_loading_and_copies_last_as_long_as_said_what_really_happens_included(takes_s: float, lasts_s: float) -> None:
    clock = Clock()

    def move(batch: int) -> int:
        clock.at += takes_s
        return -batch

    pipeline = Pipeline(loading=Seconds(5.0), h2d=Seconds(5.0))
    feed = Feed(source(clock, takes_s), pipeline, clock.now, clock.pause)
    assert (next(feed), clock.at) == (0, lasts_s)
    assert (next(feed), clock.at) == (1, 2 * lasts_s)
    assert (feed.copied(1, move), clock.at) == (-1, 3 * lasts_s)


def test_without_arguments_nothing_lasts_and_no_thread_is_started() -> None:
    clock, before = Clock(), threading.active_count()
    with closing(Feed(source(clock, 0.0), Pipeline(), clock.now, clock.pause)) as feed:
        assert [next(feed) for _ in range(3)] == [0, 1, 2]
        assert feed.copied(3, lambda batch: batch) == 3
        assert threading.active_count() == before
    assert clock.at == 0.0


class Watched(Iterator[int]):
    """Numbers; notes in which thread and how far ahead of whoever takes them they were made."""

    def __init__(self, ends_after: int) -> None:
        self.made, self.taken, self.furthest = 0, 0, 0
        self.threads: set[str] = set()
        self.changed = threading.Condition()
        self._ends_after = ends_after

    def __next__(self) -> int:
        with self.changed:
            self.threads.add(threading.current_thread().name)
            if self.made == self._ends_after:
                raise StopIteration
            self.made += 1
            self.furthest = max(self.furthest, self.made - self.taken)
            self.changed.notify_all()
            return self.made - 1

    def wait_until_made(self, number: int) -> None:
        with self.changed:
            assert self.changed.wait_for(lambda: self.made >= number, LIMIT_S)


@pytest.mark.parametrize("prefetch", [1, 3])
def test_so_many_batches_are_prepared_ahead_by_a_thread(prefetch: int) -> None:
    watched = Watched(ends_after=20)
    with closing(Feed(watched, Pipeline(prefetch=prefetch))) as feed:
        for number in range(5):
            watched.wait_until_made(number + prefetch)  # before anybody asks
            with watched.changed:
                watched.taken += 1
            assert next(feed) == number
    assert watched.threads == {"syncline-prefetch"}
    assert watched.furthest <= prefetch
    assert not any(thread.name == "syncline-prefetch" for thread in threading.enumerate())


def test_what_ends_the_source_comes_after_what_it_gave_and_again() -> None:
    with closing(Feed(Watched(ends_after=2), Pipeline(prefetch=5))) as feed:
        assert list(feed) == [0, 1]
        assert list(feed) == []


def test_what_the_source_raises_is_raised_where_the_batch_is_asked_for() -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise OSError("the disk is gone")

    for prefetch in (0, 2):
        with closing(Feed(broken(), Pipeline(prefetch=prefetch))) as feed:
            assert next(feed) == 1
            with pytest.raises(OSError, match="the disk is gone"):
                next(feed)


def test_a_batch_under_way_does_not_hold_up_the_end() -> None:
    with closing(Feed(Watched(ends_after=2), Pipeline(loading=Seconds(3000.0), prefetch=1))):
        pass  # closing wakes the thread, which would sleep for the better part of an hour


@given(*[st.floats(0, 100)] * 3, st.integers(1, 9))
def test_prefetched_loading_is_hidden_behind_the_rest_of_an_iteration(
    loading: float, h2d: float, compute: float, prefetch: int
) -> None:
    plain = Pipeline(Seconds(loading), Seconds(h2d))
    ahead = Pipeline(Seconds(loading), Seconds(h2d), prefetch)
    assert plain.least_s(compute) == loading + (h2d + compute)
    assert ahead.least_s(compute) == max(loading, h2d + compute) <= plain.least_s(compute)


def test_times_and_numbers_that_make_no_sense_are_refused() -> None:
    for wrong in (-0.001, 3601.0, float("nan")):
        with pytest.raises(UsageError, match="loading must be a time from 0s to 1h"):
            Pipeline(loading=Seconds(wrong))
        with pytest.raises(UsageError, match="h2d must be a time from 0s to 1h"):
            Pipeline(h2d=Seconds(wrong))
    with pytest.raises(UsageError, match=r"prefetch must be a number of batches from 0 \(none ahead\) up, got -1"):
        Pipeline(prefetch=-1)
