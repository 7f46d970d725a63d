"""Global batches: every sample of an epoch is used once and in one order, whatever workers come, go and fail."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import syncline
from syncline.errors import MismatchError, UsageError
from syncline.global_batches import GlobalBatches, SampleLog, global_batches_of, read_log, share
from syncline.sampling import SampleOrder
from syncline.session.session import Session


def workers(order: SampleOrder, world: int, state: Mapping[str, Any] | None = None) -> list[GlobalBatches]:
    """The samplers of a group, at a position that was saved."""
    found = [GlobalBatches(order, rank, world) for rank in range(world)]
    for sampler in found:
        if state is not None:
            sampler.load_state_dict(json.loads(json.dumps(state)))
    return found


def united(parts: list[list[int]]) -> list[int]:
    """The batch of which these are the workers' parts."""
    whole = parts[0] == parts[-1] and len(parts) > len(parts[0])
    if whole:
        assert all(part == parts[0] for part in parts)
    else:
        sizes = [len(part) for part in parts]
        assert max(sizes) - min(sizes) <= 1
        assert min(sizes) > 0
    return parts[0] if whole else [index for part in parts for index in part]


@given(
    st.integers(1, 40),
    st.integers(1, 12),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5), st.integers(0, 2)), max_size=8),
)
def test_losses_joins_and_repeated_steps_leave_the_order_of_samples_as_it_is(
    samples: int, batch: int, drop_last: bool, course: list[tuple[int, int, int]]
) -> None:
    """A course has numbers of workers; how many steps each makes; and how many further ones it begins and loses."""
    drop_last = drop_last and samples >= batch
    order = SampleOrder(samples, seed=3, global_batch=batch, drop_last=drop_last)
    used: list[int] = []
    state: dict[str, Any] | None = None
    for world, steps, lost in [*course, (2, 2 * order.steps, 0)]:
        group, left = workers(order, world, state), steps
        while left:
            iterators = [iter(sampler) for sampler in group]
            for parts in islice(zip(*iterators, strict=True), left):
                used += united([list(part) for part in parts])
                for sampler in group:
                    sampler.commit()
                left -= 1
        for parts in islice(zip(*map(iter, group), strict=True), lost):
            united([list(part) for part in parts])
        states = [sampler.state_dict() for sampler in group]
        assert all(one == states[0] for one in states)
        state = states[0]
    size = order.steps * batch if drop_last else samples
    for epoch in range(len(used) // size + 1):
        expected = order.indices(epoch)[:size].tolist()
        assert used[epoch * size : (epoch + 1) * size] == expected[: max(0, len(used) - epoch * size)]
    assert len(used) >= size


@given(st.integers(1, 50), st.integers(1, 60))
def test_the_mean_over_workers_is_the_mean_over_the_batch(size: int, world: int) -> None:
    batch = np.arange(size) ** 2
    parts = [share(batch, rank, world) for rank in range(world)]
    weights = [len(part) for part in parts]
    mean = sum(weight * part.mean() for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    np.testing.assert_allclose(mean, batch.mean(), rtol=1e-12)


@pytest.mark.parametrize(
    ("samples", "batch", "drop_last", "sizes"),
    [
        (1, 4, False, [1]),
        (3, 4, False, [3]),
        (4, 4, False, [4]),
        (4, 4, True, [4]),
        (5, 4, False, [4, 1]),
        (5, 4, True, [4]),
        (8, 4, False, [4, 4]),
    ],
)
@pytest.mark.parametrize("world", [1, 3, 5])
def test_sizes_at_the_ends(samples: int, batch: int, drop_last: bool, sizes: list[int], world: int) -> None:
    group = workers(SampleOrder(samples, global_batch=batch, drop_last=drop_last), world)
    assert [len(sampler) for sampler in group] == [len(sizes)] * world
    found = [len(united([list(part) for part in parts])) for parts in zip(*map(iter, group), strict=True)]
    assert found == sizes


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"samples": 0}, "the data set's length must be a number from 1"),
        ({"global_batch": 0}, "global_batch must be a number from 1"),
        ({"global_batch": 2.0}, "global_batch must be a whole number"),
        ({"batch_size": 2}, "give one of the two"),
        ({"samples": 3, "drop_last": True}, "no batch is left: the data set has 3 samples, and a global batch 4"),
        ({"global_batch": None, "drop_last": True}, "drop_last= is for global batches"),
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        SampleOrder(**{"samples": 10, "global_batch": 4, **values})


def sampler_of_three_steps() -> GlobalBatches:
    return GlobalBatches(SampleOrder(10, global_batch=4), 0, 2)


def test_commits_that_are_forgotten_or_too_many_are_refused() -> None:
    sampler = sampler_of_three_steps()
    with pytest.raises(UsageError, match=r"only 0 of its batches were used"):
        sampler.commit()
    first = list(sampler)
    sampler.commit(2)
    with pytest.raises(UsageError, match=r"1 of the 3 batches of epoch 0 were used, but no commit\(\) counts them"):
        iter(sampler)
    with pytest.raises(UsageError, match="commit\\(\\) of 2 after step 2"):
        sampler.commit(2)
    sampler.load_state_dict(sampler.state_dict())
    assert list(sampler) == first[2:]
    sampler.commit()
    assert (sampler.epoch, sampler.step) == (1, 0)
    assert list(sampler) != first


@pytest.mark.parametrize("steps", [0, -1, 1.0, True])
def test_commits_count_whole_steps(steps: Any) -> None:
    with pytest.raises(UsageError, match=r"commit\(\) takes a number of steps from 1"):
        sampler_of_three_steps().commit(steps)


def test_who_sets_the_present_epoch_keeps_the_position() -> None:
    """As trainers do at the beginning of each epoch, and of a resumed one."""
    sampler = sampler_of_three_steps()
    batches = iter(sampler)
    next(batches)
    sampler.commit()
    sampler.set_epoch(0)
    assert sampler.step == 1
    sampler.set_epoch(4)
    assert (sampler.epoch, sampler.step) == (4, 0)
    with pytest.raises(UsageError, match=r"set_epoch\(\) takes"):
        sampler.set_epoch(-1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"samples": 11}, "samples is 11, but this one has 10"),
        ({"seed": 1}, "seed is 1, but this one has 0"),
        ({"global_batch": 2}, "global_batch is 2, but this one has 4"),
        ({"step": 3}, "at step 3, but an epoch has 3 steps"),
        ({"step": -1}, "step is -1"),
        ({"epoch": True}, "epoch is True"),
        ({"epoch": 1 << 32}, "takes a whole number"),
        ({"digest": 5}, "another version of NumPy"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(change: dict[str, Any], words: str) -> None:
    sampler = sampler_of_three_steps()
    state = sampler.state_dict()
    with pytest.raises(UsageError, match=words):
        sampler.load_state_dict(state | change)
    with pytest.raises(UsageError, match="it has no step"):
        sampler.load_state_dict({name: value for name, value in state.items() if name != "step"})
    assert sampler.state_dict() == state


def test_what_a_loader_fetches_ahead_does_not_move_the_position() -> None:
    from torch.utils.data import DataLoader

    sampler = GlobalBatches(SampleOrder(24, global_batch=4, seed=5), 1, 2)
    loader: Any = DataLoader(range(100, 124), batch_sampler=sampler, num_workers=2)  # type: ignore[arg-type]
    batches, seen = iter(loader), []
    for _ in range(2):
        seen.append(next(batches).tolist())
        sampler.commit()
    next(batches)
    assert sampler._yielded > 3  # the loader is ahead
    state = sampler.state_dict()
    assert (state["epoch"], state["step"]) == (0, 2)
    del batches
    resumed = GlobalBatches(SampleOrder(24, global_batch=4, seed=5), 1, 2)
    resumed.load_state_dict(state)
    seen += [[100 + index for index in part] for part in resumed]
    whole = GlobalBatches(SampleOrder(24, global_batch=4, seed=5), 1, 2)
    assert seen == [[100 + index for index in part] for part in whole]


def test_the_last_step_is_logged_again_by_who_writes_from_then_on(tmp_path: Path) -> None:
    """Worker 0 is lost after it has committed a step that worker 1 has not."""
    path, order = tmp_path / "samples.jsonl", SampleOrder(10, seed=1, global_batch=4)
    first, second = (
        GlobalBatches(order, rank, 2, log=SampleLog(str(path), 0, [0, 1], writes=not rank)) for rank in range(2)
    )
    for sampler in (first, second):
        assert len(list(sampler)) == 3
        sampler.commit()
    first.commit()
    second.divide(first.state_dict(), 0, 1, lambda: None, SampleLog(str(path), 0, [1], writes=True))
    assert list(second) == [order.indices(0)[8:].tolist()]
    second.commit()
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["members"]) for line in lines] == [(0, [0, 1]), (1, [0, 1]), (1, [0, 1]), (2, [1])]
    assert lines[1]["samples"] == lines[2]["samples"] == order.indices(0)[4:8].tolist()


def test_steps_before_the_script_began_are_not_logged_again(tmp_path: Path) -> None:
    path, order = tmp_path / "samples.jsonl", SampleOrder(10, global_batch=4)
    sampler = GlobalBatches(order, 0, 2, log=SampleLog(str(path), 0, [0, 1], writes=True))
    sampler.load_state_dict(sampler.state_dict() | {"step": 2})
    sampler.divide(sampler.state_dict(), 0, 1, lambda: None, SampleLog(str(path), 0, [0], writes=True))
    sampler.set_epoch(3)
    sampler.divide(sampler.state_dict(), 0, 1, lambda: None, SampleLog(str(path), 0, [0], writes=True))
    assert not path.exists()


def test_an_abandoned_iteration_does_not_count() -> None:
    sampler = sampler_of_three_steps()
    old = iter(sampler)
    next(old)
    sampler.load_state_dict(sampler.state_dict())
    assert len(list(old)) == 2
    with pytest.raises(UsageError, match="only 0 of its batches were used"):
        sampler.commit()
    assert len(list(sampler)) == 3


# In a run.


def test_parts_of_different_sizes_need_weights(group: Any) -> None:
    import torch

    from syncline.frameworks.torch import release
    from syncline.frameworks.torch.options import Options
    from syncline.frameworks.torch.prepare import prepare

    def body(session: Session) -> None:
        sampler = global_batches_of(session, SampleOrder(10, global_batch=4))
        model = torch.nn.Linear(2, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        prepare(session, model, optimizer, Options(weight="batch"))
        assert len(list(sampler)) == 3
        sampler.commit(3)
        release(session, model)
        assert not session.weighed
        prepare(session, model, optimizer, Options(weight=1))
        with pytest.raises(UsageError, match=r"parts of different sizes.*weight='batch'"):
            iter(sampler)
        assert len(list(global_batches_of(session, SampleOrder(10, global_batch=6, drop_last=True)))) == 1
        assert len(list(global_batches_of(session, SampleOrder(4, global_batch=2)))) == 2
        release(session, model)

    group("ring", 3, body)


@pytest.mark.parametrize("world", [1, 3, 6])
def test_steps_are_those_of_one_worker(group: Any, world: int) -> None:
    """With parts of different sizes, and with batches that have fewer samples than there are workers."""
    import torch

    from syncline.frameworks.torch.options import Options
    from syncline.frameworks.torch.prepare import prepare

    order = SampleOrder(11, seed=2, global_batch=4)
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randn(11, size, generator=numbers, dtype=torch.float64) for size in (3, 1))

    def steps(batches: Iterator[list[int]], session: Session | None = None) -> Iterator[torch.Tensor]:
        model = torch.nn.Linear(3, 1, dtype=torch.float64)
        for parameter in model.parameters():
            torch.nn.init.constant_(parameter, 0.5)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if session is not None and not session.alone:
            prepare(session, model, optimizer, Options(weight="batch"))
        for batch in batches:
            optimizer.zero_grad()
            torch.nn.functional.mse_loss(model(x[batch]), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            yield model.weight.detach().clone()

    def body(session: Session) -> list[torch.Tensor]:
        sampler = global_batches_of(session, order)

        def batches() -> Iterator[list[int]]:
            while sampler.epoch < 2:
                for batch in sampler:
                    yield batch
                    sampler.commit()

        return list(steps(batches(), session))

    whole = [order.indices(epoch)[start : start + 4].tolist() for epoch in range(2) for start in (0, 4, 8)]
    expected = list(steps(iter(whole)))
    for found in group("ring", world, body):
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


def test_workers_at_their_own_pace_have_no_global_batch(group: Any) -> None:
    def body(session: Session) -> None:
        with pytest.raises(UsageError, match="under sync=asp each worker goes at its own pace"):
            global_batches_of(session, SampleOrder(10, global_batch=4))
        session.barrier()

    group("ps(servers=1, on=workers) sync=asp", 2, body)


def test_workers_with_different_data_are_named(group: Any) -> None:
    with pytest.raises(MismatchError, match=r"global_batch is .* on rank"):
        group("ring", 2, lambda session: global_batches_of(session, SampleOrder(10, global_batch=4 + session.rank)))


@pytest.mark.usefixtures("alone")
def test_one_worker_has_whole_batches() -> None:
    sampler = syncline.sampler(5, global_batch=2, shuffle=False)
    assert not sampler.pooled
    assert list(sampler) == [[0, 1], [2, 3], [4]]


def test_a_line_that_a_killed_writer_has_begun_is_left_out(tmp_path: Path) -> None:
    """Another worker writes the step again, on a line of its own."""
    file = tmp_path / "samples.jsonl"
    how = {"strategy": "ring", "algorithms": []}
    SampleLog(str(file), 0, [0, 1], True, how).write(0, 0, np.arange(3))
    file.write_text(file.read_text()[:-9])
    log = SampleLog(str(file), 0, [1], True, how)
    log.write(0, 0, np.arange(3))
    log.write(0, 1, np.arange(3, 6))
    found = read_log(str(file))
    assert [(at, line["members"], line["samples"]) for at, line in found.items()] == [
        ((0, 0), [1], [0, 1, 2]),
        ((0, 1), [1], [3, 4, 5]),
    ]


def test_the_first_line_of_a_file_counts_after_one_that_a_killed_writer_has_begun(tmp_path: Path) -> None:
    """As ``cat`` puts two files together."""
    how = {"strategy": "ring", "algorithms": []}
    parts = [tmp_path / "first.jsonl", tmp_path / "second.jsonl"]
    for step, part in enumerate(parts):
        SampleLog(str(part), 0, [step], True, how).write(0, step, np.array([step]))
    for kept in (1, 11, 12, 40, len(parts[0].read_text()) - 2):
        both = tmp_path / "both.jsonl"
        both.write_text(parts[0].read_text()[:kept] + parts[1].read_text())
        assert [(at, line["members"]) for at, line in read_log(str(both)).items()] == [((0, 1), [1])]


def test_the_lines_of_several_files_count_by_view_in_any_order(tmp_path: Path) -> None:
    """The same step in views 1 and 2, by workers that have written to two files, and twice in view 2."""
    parts = []
    for view, members, samples in ((1, [0, 1], [0]), (2, [1, 2], [1]), (2, [1, 2], [2])):
        how = {"strategy": "ring", "algorithms": [], "view": view, "nodes": [0, view]}
        part = tmp_path / f"{len(parts)}.jsonl"
        SampleLog(str(part), 0, members, True, how).write(0, 0, np.array(samples))
        parts.append(part.read_text())
    both = tmp_path / "both.jsonl"
    for order, samples in (((0, 1, 2), [2]), ((1, 2, 0), [2]), ((1, 0, 2), [2]), ((2, 1, 0), [1])):
        both.write_text("".join(parts[number] for number in order))
        (line,) = read_log(str(both)).values()
        assert (line["members"], line["nodes"], line["samples"]) == ([1, 2], [0, 2], samples)


@pytest.mark.parametrize(
    "change", [{"view": None}, {"view": "1"}, {"nodes": None}, {"nodes": [0]}, {"nodes": ["a", 1]}]
)
def test_a_line_whose_hosts_or_view_are_none_is_refused(tmp_path: Path, change: dict[str, Any]) -> None:
    line = {"sampler": 0, "members": [0, 1], "view": 1, "nodes": [0, 1], "strategy": "ring", "algorithms": []}
    file = tmp_path / "samples.jsonl"
    file.write_text(json.dumps({**line, "epoch": 0, "step": 0, "samples": [1]}) + "\n")
    assert read_log(str(file))
    file.write_text(json.dumps({**line, "epoch": 0, "step": 0, "samples": [1], **change}) + "\n")
    with pytest.raises(UsageError, match="line 1 of"):
        read_log(str(file))


def test_a_step_is_logged_again_with_the_workers_that_made_it(tmp_path: Path) -> None:
    """Two losses without a step between them: the second one's survivor logs it, though it has had a view since."""
    file = str(tmp_path / "samples.jsonl")
    how = {"strategy": "ring", "algorithms": []}
    batches = GlobalBatches(
        SampleOrder(24, seed=4, global_batch=4), 2, 3, log=SampleLog(file, 0, [0, 1, 2], False, how)
    )
    walk = iter(batches)
    for _ in range(2):
        next(walk)
    batches.commit(2)
    for rank, members in ((1, [0, 2]), (0, [2])):
        log = SampleLog(file, 0, members, rank == 0, how)
        batches.divide(batches.state_dict(), rank, len(members), lambda: None, log)
    assert {at: line["members"] for at, line in read_log(file).items()} == {(0, 0): [0, 1, 2], (0, 1): [0, 1, 2]}
