"""The pool as a state machine: every position once per epoch, whoever asks when, and whoever leaves."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from syncline import sampling as pool_module
from syncline.sampling import MOST_EPOCHS, MOST_OPEN, Pool

ranks = st.integers(0, 3)


class Asking(RuleBasedStateMachine):
    """Workers ask in any order, begin further epochs and leave."""

    @initialize(samples=st.integers(1, 40), piece=st.integers(1, 9), workers=st.integers(1, 4))
    def begin(self, samples: int, piece: int, workers: int) -> None:
        self.samples, self.piece, self.workers = samples, piece, workers
        self.pool = Pool(samples, piece, workers)
        self.epochs = dict.fromkeys(range(workers), 0)  # of those that have not left
        self.given: dict[int, list[range]] = {}

    @rule(rank=ranks)
    def take(self, rank: int) -> None:
        if rank not in self.epochs:
            with pytest.raises(ValueError, match="it has left"):
                self.pool.take(rank, 0)
            return
        epoch = self.epochs[rank]
        piece = self.pool.take(rank, epoch)
        left = self.samples - sum(map(len, self.given.get(epoch, [])))
        assert len(piece) == min(self.piece, left)
        self.given.setdefault(epoch, []).append(piece)

    @rule(rank=ranks, on=st.integers(1, 3))
    def go_on(self, rank: int, on: int) -> None:
        """Whether the epoch is over or was broken off."""
        if rank in self.epochs:
            self.epochs[rank] += on

    @rule(rank=ranks)
    def go_back(self, rank: int) -> None:
        if self.epochs.get(rank, 0) == 0:
            return
        self.take(rank)  # the pool knows by now where it is
        with pytest.raises(ValueError, match="after epoch"):
            self.pool.take(rank, self.epochs[rank] - 1)

    @precondition(lambda self: len(self.epochs) > 0)
    @rule(rank=ranks)
    def leave(self, rank: int) -> None:
        if rank not in self.epochs:
            with pytest.raises(ValueError, match="it has left already"):
                self.pool.leave(rank)
            return
        self.pool.leave(rank)
        del self.epochs[rank]

    @invariant()
    def every_position_is_given_once(self) -> None:
        for pieces in getattr(self, "given", {}).values():
            given = [position for piece in pieces for position in piece]
            assert given == list(range(len(given)))  # in order, none twice, none beyond
            assert len(given) <= self.samples

    @invariant()
    def it_remembers_only_epochs_that_somebody_may_ask_for(self) -> None:
        if hasattr(self, "pool"):
            least = min(self.pool._at.values(), default=MOST_EPOCHS)
            assert all(epoch >= least for epoch in self.pool._left)
            assert self.pool.over == (not self.epochs)

    def teardown(self) -> None:
        """Whoever is left can always finish what has begun."""
        for rank, epoch in getattr(self, "epochs", {}).items():
            while piece := self.pool.take(rank, epoch):
                self.given.setdefault(epoch, []).append(piece)
            assert sum(map(len, self.given[epoch])) == self.samples


TestAsking = Asking.TestCase


def test_a_worker_that_is_far_ahead_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MOST_OPEN", 3)
    assert MOST_OPEN > 3
    pool = Pool(1, 1, 2)
    pool.take(1, 0)
    pool.take(0, 1)
    pool.take(0, 2)
    with pytest.raises(ValueError, match="begins epoch 3 while 3 are open"):
        pool.take(0, 3)
    pool.take(1, 2)  # which forgets those before
    assert list(pool.take(0, 3)) == [0]


@pytest.mark.parametrize("epoch", [-2, MOST_EPOCHS])
def test_an_epoch_is_a_number_within_bounds(epoch: int) -> None:
    with pytest.raises(ValueError, match=f"asks for epoch {epoch}"):
        Pool(4, 1, 1).take(0, epoch)
    assert list(Pool(4, 4, 1).take(0, MOST_EPOCHS - 1)) == [0, 1, 2, 3]
