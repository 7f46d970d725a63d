"""Samplers of a group, one thread per rank: from a pool, and split, with what their workers do."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import pytest

import syncline
from syncline import sampling
from syncline.errors import MismatchError, NotBuiltError, ProtocolError, SynclineError, UsageError
from syncline.sampling import ASKED, MOST_EPOCHS, PoolBatches, SampleOrder, Sampler, sampler_of
from syncline.session.session import Session

POOLED, SPLIT = "ps(servers=1, on=workers) sync=asp", "ring"


def drained(session: Session, sampler: Sampler, epochs: int) -> list[list[int]]:
    """What this worker gets in each epoch, and be there until all have."""
    found = [[int(index) for batch in sampler for index in batch] for _ in range(epochs)]
    session.barrier()
    return found


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("samples", [1, 20, 41])
def test_every_sample_comes_once_in_every_epoch(group: Any, workers: int, samples: int) -> None:
    def body(session: Session) -> Any:
        return drained(session, sampler_of(session, SampleOrder(samples, 4)), 3)

    found = group(POOLED, workers, body)
    for epoch in range(3):
        assert Counter(index for worker in found for index in worker[epoch]) == Counter(range(samples))


def test_who_is_slow_does_fewer(group: Any) -> None:
    """Rank 1 takes one batch, and comes back when the others have done all there is."""

    def body(session: Session) -> Any:
        batches = iter(sampler_of(session, SampleOrder(40, 4, shuffle=False)))
        taken = [next(batches)]
        session.barrier()
        if session.rank == 1:
            session.barrier()
        taken += batches
        if session.rank != 1:
            session.barrier()
        return [index for batch in taken for index in batch]

    first, second, third = group(POOLED, 3, body)
    assert len(second) == 8  # the batch that it had taken, and the one that it had asked for ahead
    assert sorted(first + second + third) == list(range(40))


def test_a_worker_may_break_off_an_epoch_and_leave(group: Any) -> None:
    def body(session: Session) -> Any:
        sampler = sampler_of(session, SampleOrder(30, 1))
        if session.rank == 0:
            session.barrier()
            return [index for (index,) in sampler]
        batches = iter(sampler)
        next(batches)
        session.barrier()
        return None

    assert len(group(POOLED, 2, body)[0]) == 28  # one was taken, one asked for ahead


def test_samplers_of_one_run_have_pools_of_their_own(group: Any) -> None:
    def body(session: Session) -> Any:
        first, second = sampler_of(session, SampleOrder(10)), sampler_of(session, SampleOrder(6, 2))
        found: tuple[list[int], list[int]] = ([], [])
        one, other = iter(first), iter(second)
        found[0].append(next(one))
        found[1].extend(next(other))
        session.barrier()
        found[1].extend(index for batch in other for index in batch)
        found[0].extend(one)
        session.barrier()
        return found

    ones = group(POOLED, 2, body)
    assert sorted(ones[0][0] + ones[1][0]) == list(range(10))
    assert sorted(ones[0][1] + ones[1][1]) == list(range(6))


def test_workers_in_step_have_equal_shares(group: Any) -> None:
    def body(session: Session) -> Any:
        sampler = sampler_of(session, SampleOrder(10, 2, seed=3))
        lengths = len(sampler), sampler.pooled
        return lengths, [list(sampler) for _ in range(2)], list(reset(sampler, 0))

    found = group(SPLIT, 3, body)
    for lengths, epochs, again in found:
        assert lengths == (2, False)
        assert [len(batch) for batch in epochs[0]] == [2, 2]
        assert epochs[0] == again != epochs[1]
    for epoch in range(2):
        assert {index for _, epochs, _ in found for batch in epochs[epoch] for index in batch} == set(range(10))


@pytest.mark.parametrize("sync", ["bsp", "asp"])
def test_a_server_that_runs_the_script_so_far_takes_part_in_nothing(group: Any, sync: str) -> None:
    """Scripts make their loaders before ``prepare``, which servers do not come back from."""

    def body(session: Session) -> Any:
        sampler = sampler_of(session, SampleOrder(10, 2, shuffle=False))
        if session.is_worker:
            found = [index for batch in sampler for index in batch]
            session.barrier()
            return found
        session.engine.wait_any([], until=session.process.workers_left)
        return list(sampler)

    first, second, server = group(f"ps(servers=1) sync={sync}", 2, body)
    assert sorted(first + second) == list(range(10))
    assert server == [[1, 3], [5, 7], [9]]


def reset(sampler: Sampler, epoch: int) -> Sampler:
    sampler.set_epoch(epoch)
    return sampler


@pytest.mark.parametrize("strategy", [POOLED, SPLIT])
@pytest.mark.parametrize(("name", "other"), [("samples", 11), ("seed", 2), ("batch_size", 3)])
def test_workers_with_different_data_are_named(group: Any, strategy: str, name: str, other: int) -> None:
    def body(session: Session) -> None:
        values = {"samples": 10, "batch_size": 2, "seed": 1}
        sampler_of(session, SampleOrder(**(values | ({name: other} if session.rank else {}))))  # type: ignore[arg-type]

    with pytest.raises(MismatchError, match=f"sampler.*{name} is .* on rank"):
        group(strategy, 2, body)


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (b"what?", "no JSON"),
        ({"kind": "steal"}, "kind is 'steal'"),
        ({"kind": "take", "sampler": 0}, "epoch is None"),
        ({"kind": "take", "sampler": -1, "epoch": 0}, "sampler is -1"),
        ({"kind": "take", "sampler": 1, "epoch": 0}, "there is no sampler 1"),
        ({"kind": "take", "sampler": 0, "epoch": MOST_EPOCHS}, f"asks for epoch {MOST_EPOCHS}"),
        ([], "a list in place of an object"),
    ],
)
def test_what_no_worker_asks_ends_the_run_and_names_it(group: Any, message: Any, why: str) -> None:
    def body(session: Session) -> None:
        sampler_of(session, SampleOrder(10, 2))
        if session.rank == 1:
            data = message if isinstance(message, bytes) else json.dumps(message).encode()
            session.send(0, data, "a request", ASKED)
        session.barrier()
        session.barrier()

    with pytest.raises(ProtocolError, match=f"what batches rank 1 asks for from rank 1 makes no sense: .*{why}"):
        group(POOLED, 2, body)


def test_a_request_that_is_too_long_ends_the_run(group: Any) -> None:
    def body(session: Session) -> None:
        sampler_of(session, SampleOrder(10, 2))
        if session.rank == 1:
            session.send(0, b" " * 257, "a request", ASKED)
        session.barrier()
        session.barrier()

    with pytest.raises(SynclineError, match=r"what batches rank 1 asks for.*257"):
        group(POOLED, 2, body)


@pytest.mark.parametrize("answer", [{"start": 4, "stop": 2}, {"start": 0, "stop": 11}, {"start": -1, "stop": 2}])
def test_an_answer_that_is_none_is_named(group: Any, monkeypatch: pytest.MonkeyPatch, answer: dict[str, int]) -> None:
    send = sampling.Pools._send

    def lie(self: Any, to: int, message: dict[str, object], *rest: Any, **more: Any) -> None:
        send(self, to, dict(answer) if "start" in message else message, *rest, **more)

    monkeypatch.setattr(sampling.Pools, "_send", lie)
    with pytest.raises(ProtocolError, match="the next batch of epoch 0 from rank 0 makes no sense"):
        group(POOLED, 2, lambda session: list(sampler_of(session, SampleOrder(10, 2))))


# Alone, by the public call.


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_takes_it_either_way(workers: int) -> None:
    from torch.utils.data import DataLoader

    data = list(range(100, 110))
    batched = DataLoader(data, batch_sampler=syncline.sampler(data, batch_size=4), num_workers=workers)  # type: ignore[arg-type,var-annotated]
    single = DataLoader(data, batch_size=4, sampler=syncline.sampler(data), num_workers=workers)  # type: ignore[arg-type,var-annotated]
    for loader in (batched, single):
        assert len(loader) == 3
        assert sorted(int(sample) for batch in loader for sample in batch) == data


@pytest.mark.usefixtures("alone")
def test_a_number_of_samples_is_a_data_set_too() -> None:
    assert sorted(syncline.sampler(5)) == list(range(5))
    assert list(syncline.sampler(5, batch_size=2, shuffle=False)) == [[0, 1], [2, 3], [4]]


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("epoch", [-1, MOST_EPOCHS, 1.0, True])
def test_an_epoch_is_a_whole_number(epoch: Any) -> None:
    with pytest.raises(UsageError, match=r"set_epoch\(\) takes a whole number from 0"):
        syncline.sampler(5).set_epoch(epoch)


def test_a_pool_has_no_length_and_no_epoch_twice(group: Any) -> None:
    def body(session: Session) -> None:
        sampler = sampler_of(session, SampleOrder(10, 2))
        assert sampler.pooled
        with pytest.raises(TypeError, match="has no length"):
            len(sampler)
        sampler.set_epoch(4)
        list(sampler)
        sampler.set_epoch(4)
        with pytest.raises(UsageError, match=r"epoch 4 is over: .*set_epoch\(\) with 5 or more"):
            iter(sampler)
        session.barrier()

    group(POOLED, 2, body)


def test_a_run_has_so_many_samplers(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "MOST_SAMPLERS", 1)

    def body(session: Session) -> None:
        sampler_of(session, SampleOrder(10, 2))
        sampler_of(session, SampleOrder(10, 2))

    with pytest.raises(UsageError, match="up to 1 samplers"):
        group(POOLED, 2, body)


# In an elastic run: batches that pushes name.


def counting(session: Session, samples: int, batch_size: int | None = 4) -> PoolBatches:
    session.elastic = True
    sampler = sampler_of(session, SampleOrder(samples, batch_size, shuffle=False))
    assert isinstance(sampler, PoolBatches)
    return sampler


def used(session: Session) -> tuple[int, int, int]:
    """What the next push names."""
    assert session.next_samples is not None
    epoch, start, stop = session.next_samples()
    return epoch, start, stop


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_pushes_of_an_elastic_run_name_each_sample_once_per_epoch(group: Any, workers: int) -> None:
    """Also those of a loader that fetches ahead, as far as it can."""

    def body(session: Session) -> Any:
        sampler, found = counting(session, 22), []
        while sampler.epoch < 3:
            for batch in list(sampler) if session.rank == 0 else sampler:
                epoch, start, stop = used(session)
                assert (epoch, list(range(start, stop))) == (sampler.epoch, batch)
                found += [(epoch, index) for index in batch]
                sampler.commit()
        session.barrier()
        return found

    names = [name for worker in group(POOLED, workers, body) for name in worker]
    assert sorted(names) == [(epoch, index) for epoch in range(3) for index in range(22)]


def test_a_pool_begins_with_what_the_weights_do_not_contain(group: Any) -> None:
    def body(session: Session) -> None:
        sampler = counting(session, 12)
        assert next(iter(sampler)) == [0, 1, 2, 3]
        session.pools, session.counted = None, [(0, 0, 12), (1, 0, 3), (1, 5, 8), (2, 0, 12)]
        sampler.enter(session)
        found = []
        while sampler.epoch < 4:
            assert sampler.where.startswith(f"epoch {sampler.epoch}, of which ")
            for batch in sampler:
                found.append((*used(session), batch))
                sampler.commit()
        assert found[:3] == [(1, 3, 5, [3, 4]), (1, 8, 12, [8, 9, 10, 11]), (3, 0, 4, [0, 1, 2, 3])]

    group(POOLED, 1, body)


def test_a_batch_comes_again_until_it_is_committed(group: Any) -> None:
    def body(session: Session) -> None:
        sampler = counting(session, 12)
        first, second = (batch for batch, _ in zip(sampler, range(2), strict=False))
        assert used(session) == (0, 0, 4)
        sampler.commit()
        again = iter(sampler)
        assert next(again) == second != first
        assert used(session) == (0, 4, 8)
        with pytest.raises(UsageError, match="a second time without commit"):
            used(session)
        sampler.commit()
        with pytest.raises(UsageError, match="takes one batch"):
            sampler.commit(2)
        assert list(again) == [[8, 9, 10, 11]]
        with pytest.raises(UsageError, match=r"no commit.. counts 1 batches of epoch 0 that were used"):
            iter(sampler)
        used(session)
        sampler.commit()
        assert sampler.epoch == 1
        with pytest.raises(UsageError, match="without a batch of this run's sampler"):
            used(session)
        with pytest.raises(UsageError, match="takes one batch, after its"):
            sampler.commit()
        sampler.set_epoch(4)
        next(iter(sampler))
        assert used(session)[0] == 4
        with pytest.raises(UsageError, match="a pool goes forward only"):
            sampler.set_epoch(3)
        with pytest.raises(TypeError, match="no length"):
            len(sampler)

    group(POOLED, 1, body)


def test_an_elastic_run_counts_batches(group: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(NotBuiltError, match="give batch_size="):
            counting(session, 12, None)

    group(POOLED, 2, body)


def test_a_script_for_elastic_runs_works_in_others(group: Any) -> None:
    def body(session: Session) -> None:
        sampler, epochs = sampler_of(session, SampleOrder(10, 2)), []
        assert isinstance(sampler, Sampler)
        while sampler.epoch < 2:
            epochs.append(sum(map(len, sampler)))
            sampler.commit()
        assert epochs == [10, 10]

    group(POOLED, 1, body)
