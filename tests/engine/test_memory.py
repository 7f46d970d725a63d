"""Exchanges over real shared memory: the bits of messages in any order, what is kept between calls, and wake-ups."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
from exchanging import Case, cases, check, chooser, drive, wanted
from hypothesis import given, settings
from hypothesis import strategies as st
from mapped import Array, anyone, machine, placed, plan_of, run_of, turn

from syncline.engine import exchange as exchange_module
from syncline.engine import scripts
from syncline.engine.engine import Engine
from syncline.engine.exchange import Exchange
from syncline.engine.order import Order, Sign
from syncline.errors import ClosedError, PeerLost, ProtocolError, SynclineError
from syncline.kernels import board
from syncline.kernels.board import SIGN_WORDS, SLOTS
from syncline.plans.messages import compile_program
from syncline.plans.plan import Plan
from syncline.transports import shm as segments
from syncline.transports.shm import Shm

LIMIT_S = 30.0


@settings(deadline=None, max_examples=40)
@given(st.data(), cases(), st.integers(0, 511))
def test_every_algorithm_gives_the_bits_of_messages_wherever_the_arrays_lie(
    data: st.DataObject, case: Case, places: int
) -> None:
    """Numbers whose sum depends on its order; ``places`` says which ranks' arrays peers can reach in place."""
    draw = np.random.default_rng(places)
    inputs = case.inputs()
    if case.dtype in ("float32", "float64", "bfloat16"):
        inputs = [(array * 10.0 ** draw.integers(-6, 6, case.size)).astype(array.dtype) for array in inputs]
    by_messages = [array.copy() for array in inputs]
    drive(case, [[array] for array in by_messages], chooser(data))
    with machine(case.plan.world) as ends:
        arrays = [placed(end, array, bool(places >> end.rank & 1)) for end, array in zip(ends, inputs, strict=True)]
        exchanges = [Exchange(end, case.segment_bytes) for end in ends]
        runs = [run_of(case.plan, rank, array) for rank, array in enumerate(arrays)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        turn(exchanges, runs, chooser(data))
        for rank, array in enumerate(arrays):
            for part, _ in wanted(case, inputs, rank):
                assert array[part].tobytes() == by_messages[rank][part].tobytes(), f"rank {rank}"
        assert all(exchange.labels == [] and exchange.waiting_for == {} for exchange in exchanges)


@settings(deadline=None, max_examples=12)
@given(st.data(), cases(), st.integers(2, 12))
def test_runs_in_flight_may_start_in_another_order_on_every_rank(data: st.DataObject, case: Case, count: int) -> None:
    """Twice with the same keys: nobody takes an old run for the new one."""
    case = replace(case, size=min(case.size, 25))  # what many segments do is shown above
    choose = chooser(data)
    with machine(case.plan.world) as ends:
        exchanges = [Exchange(end, case.segment_bytes) for end in ends]
        for round_ in range(2):
            inputs = [case.inputs(seed + round_) for seed in range(count)]
            outputs = [[array.copy() for array in mine] for mine in inputs]
            runs = []
            for rank, exchange in enumerate(exchanges):
                keys = list(range(count))
                while keys:
                    key = keys.pop(choose(len(keys)))
                    runs.append(run_of(case.plan, rank, outputs[key][rank], key))
                    exchange.start(runs[-1])
            turn(exchanges, runs, choose)
            for key in range(count):
                check(case, inputs[key], outputs[key])


@pytest.mark.parametrize("world", [2, 3])
def test_there_may_be_more_runs_than_slots_on_the_board(world: int) -> None:
    plan, count = plan_of("recursive_doubling", world), 3 * SLOTS
    with machine(world) as ends:
        exchanges = [Exchange(end) for end in ends]
        arrays = [[np.full(3, float(key)) for key in range(count)] for _ in range(world)]
        runs = [run_of(plan, rank, arrays[rank][key], key) for rank in range(world) for key in range(count)]
        for run in runs:
            exchanges[run.program.rank].start(run)
        turn(exchanges, runs, anyone())
    assert all((arrays[rank][key] == world * key).all() for rank in range(world) for key in range(count))


@pytest.mark.parametrize("count", [SLOTS - 1, SLOTS, SLOTS + 1])
def test_a_rank_that_has_started_everything_does_not_hold_up_one_that_begins_with_the_last(count: int) -> None:
    """One run at a time, in the opposite order, and twice: nobody needs what only the end of another run sets free."""
    plan = plan_of("direct", 2)
    with machine(2) as ends:
        exchanges = [Exchange(end) for end in ends]
        for _ in range(2):
            early = [run_of(plan, 0, np.ones(3), key) for key in range(count)]
            for run in early:
                exchanges[0].start(run)
            for key in reversed(range(count)):
                late = run_of(plan, 1, np.ones(3), key)
                exchanges[1].start(late)
                turn(exchanges, [late, early[key]], anyone())
                assert (early[key].array == 2).all()
        used = exchanges[0].shared
        assert used is not None
        assert sum(len(table.users) for table in used._slots.tables) <= max(SLOTS, 8 * count)


def test_runs_are_found_in_whichever_table_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who waits is told apart from who has come, also where there was no room on the board."""
    plan, count = plan_of("direct", 2), 2 * SLOTS
    with machine(2) as ends:
        exchanges = [Exchange(end) for end in ends]
        for key in range(count):
            exchanges[1].start(run_of(plan, 1, np.ones(3), key))
        for _ in range(2 * count):  # a turn maps a segment
            for exchange in exchanges:
                exchange.progress(0.0)
        here = exchanges[0].shared
        assert here is not None
        assert all(here._has_come(1, key + 1) for key in range(count))
        assert not here._has_come(1, count + 1)
        window = here._window
        unmapped = type("", (), {"words_of": lambda _, *at: window.words_of(*at) if at[1] == 0 else np.empty(0, int)})()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(here, "_window", unmapped)
            assert here._has_come(1, count + 1)  # it may stand in the table that is not here yet
        monkeypatch.setattr(ends[0], "maps", np.zeros_like(ends[0].maps))  # a table that has not been mapped here yet
        kernel, members = here._kernel, ends[0].members
        found = [kernel.find_slot(members, ends[0].maps, 1, key + 1) for key in range(count)]
        assert kernel.UNSEEN in found
        assert kernel.NOWHERE not in found
        assert exchanges[0].waiting_for == {}


def blocked(ends: list[Shm], array: Array, plan: Plan) -> Exchange:
    """The exchange of rank 0, which waits for a rank that has not started."""
    exchange = Exchange(ends[0])
    exchange.start(run_of(plan, 0, array))
    for _ in range(20):
        for end in ends[1:]:
            end.poll(0.0)
        exchange.progress(0.0)
    return exchange


def test_a_ring_of_the_own_process_ends_the_compiled_sleep_and_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_module, "PATIENCE_MS", int(LIMIT_S * 1000))
    with machine(2) as ends:
        exchange = blocked(ends, np.ones(4), plan_of("direct", 2))
        ends[0].wake()
        thread = threading.Thread(target=exchange.progress, args=(4 * LIMIT_S,), daemon=True)
        thread.start()
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()


def test_sizes_that_differ_are_an_error_that_names_the_rank() -> None:
    plan = plan_of("ring", 3)
    with machine(3) as ends:
        exchanges = [Exchange(end) for end in ends]
        runs = [run_of(plan, rank, np.ones(100 if rank != 1 else 60)) for rank in range(3)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        with contextlib.suppress(SynclineError):  # rank 1 finds out as well
            turn(exchanges, runs, lambda _: 1)
        with pytest.raises(SynclineError, match=r"bucket 0: waiting for rank 1 .*another number of bytes than the 800"):
            turn([exchanges[0], exchanges[2]], runs, anyone())


@pytest.mark.parametrize("met", [True, False], ids=["known", "never heard of"])
def test_a_peer_that_dies_while_others_wait_is_named(met: bool) -> None:
    with machine(3) as ends:
        plan = plan_of("direct", 3)
        exchange = blocked(ends if met else ends[:1], np.ones(10), plan)
        assert set(exchange.waiting_for) == {1, 2}
        other = Exchange(ends[1]) if met else None
        if other is not None:  # rank 0 waits for one after the other
            other.start(run_of(plan, 1, np.ones(10)))
        ends[2].close()

        def wait() -> None:
            for _ in range(100):
                exchange.progress(0.0)
                if other is not None:
                    with contextlib.suppress(PeerLost):
                        other.progress(0.0)

        with pytest.raises(PeerLost, match=r"bucket 0: .*connection to rank 2 closed") as caught:
            wait()
        assert caught.value.rank == 2


def test_a_process_that_takes_no_part_may_be_gone_without_a_word() -> None:
    with machine(3) as ends:
        ends[2].close()
        plan = plan_of("ring", 2)
        arrays = [np.ones(5), np.ones(5)]
        exchanges = [Exchange(end) for end in ends[:2]]
        runs = [run_of(plan, rank, array) for rank, array in enumerate(arrays)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        turn(exchanges, runs, anyone())
        assert all((array == 2).all() for array in arrays)


@pytest.mark.parametrize("left", [True, False])
def test_a_tolerant_run_minds_peers_that_are_lost_but_not_those_that_left(left: bool) -> None:
    with machine(2) as ends:
        exchange = Exchange(ends[0], has_left=lambda _: left)
        run = run_of(plan_of("ring", 2), 0, np.ones(10), tolerant=True)
        exchange.start(run)
        for _ in range(5):
            ends[1].poll(0.0)
            exchange.progress(0.0)
        assert exchange.labels == []
        assert exchange.waiting_for == {}
        ends[1].close()
        with contextlib.nullcontext() if left else pytest.raises(PeerLost, match="rank 1"):
            for _ in range(10):
                exchange.progress(0.0)
        assert not run.done


def test_what_is_awaited_can_be_asked_after_the_transport_has_closed() -> None:
    with machine(2) as ends:
        exchange = blocked(ends, np.ones(4), plan_of("direct", 2))
        ends[0].close()
        assert set(exchange.waiting_for) == {1}


def forged(ends: list[Shm], word: int, value: int) -> None:
    """Rank 1 writes something else in its slot of the only run it has started; the run of rank 0 then meets that."""
    plan, exchanges = plan_of("direct", 2), [Exchange(end, segment_bytes=4096) for end in ends]
    exchanges[1].start(run_of(plan, 1, placed(ends[1], np.ones(4096), shared=True)))
    for _ in range(20):
        ends[0].poll(0.0)
        exchanges[1].progress(0.0)
    slots = ends[1].board[board.BOARD_HEAD // 8 :].reshape(SLOTS, -1)
    (slot,) = np.flatnonzero(slots[:, board.SLOT_ID // 8])
    slots[slot, word // 8] = value
    run = run_of(plan, 0, np.ones(4096))
    exchanges[0].start(run)
    turn(exchanges, [run], anyone())


@pytest.mark.parametrize(
    ("word", "value"),
    [
        (board.SLOT_SEGMENT, -1),
        (board.SLOT_SEGMENT, -(1 << 40)),
        (board.SLOT_SEGMENT, board.MOST_SEGMENTS),
        (board.SLOT_SEGMENT, (1 << 63) - 1),
        (board.SLOT_SEGMENT, 0),  # the board, which is smaller than the array
        (board.SLOT_OFFSET, 1),  # one past the end
        (board.SLOT_OFFSET, -8),
        (board.SLOT_OFFSET, (1 << 63) - 1),
        (board.SLOT_OFFSET, -(1 << 63)),
        (board.SLOT_STRIDE, 1),
        (board.SLOT_STRIDE, 4096 + 8),
        (board.SLOT_STRIDE, -4096),
        (board.SLOT_STRIDE, 1 << 62),
    ],
)
def test_a_slot_that_names_memory_which_its_rank_has_not_shared_is_its_fault(word: int, value: int) -> None:
    """Nothing is read or written there: this process would crash, or lose what lies beside."""
    with (
        machine(2) as ends,
        pytest.raises(ProtocolError, match="its slot for bucket 0 names memory") as caught,
    ):
        forged(ends, word, value)
    assert caught.value.rank == 1


@pytest.mark.parametrize("table", [-1, board.MOST_SEGMENTS, 1 << 62, 1])
def test_a_table_of_slots_that_is_none_is_the_fault_of_its_rank(table: int) -> None:
    with machine(2) as ends:
        ends[1].allocate(2 * SLOTS * board.SLOT_BYTES - 1)  # segment 1, one byte too small for the second table
        ends[1].board[board.TABLES // 8] = table
        with pytest.raises(ProtocolError, match="rank 1 broke the protocol") as caught:
            blocked(ends, np.ones(4), plan_of("direct", 2))
        assert caught.value.rank == 1


def test_tables_that_grow_between_two_runs_of_a_layout_are_the_ones_that_are_looked_at() -> None:
    """Compiled code has their addresses laid out; each run's memory lies in segments that were not known before."""
    plan = plan_of("direct", 2)
    with machine(2) as ends:
        exchanges = [Exchange(end) for end in ends]
        for number in range(40):
            runs = [run_of(plan, rank, placed(end, np.full(5, number), True)) for rank, end in enumerate(ends)]
            for exchange, run in zip(exchanges, runs, strict=True):
                exchange.start(run)
            turn(exchanges, runs, anyone())
            assert all((run.array == 2 * number).all() for run in runs)
        assert len(ends[0]._segments.fds) > 32


def test_memory_of_an_odd_size_can_be_searched_for_slots() -> None:
    with machine(2) as ends:
        ends[1].allocate(2 * SLOTS * board.SLOT_BYTES + 3)
        ends[1].board[board.TABLES // 8] = 1
        exchange = blocked(ends, np.ones(4), plan_of("direct", 2))
        assert set(exchange.waiting_for) == {1}


def test_arrays_of_foreign_byte_order_are_summed_as_numbers() -> None:
    plan = plan_of("direct", 2)
    arrays = [np.arange(5000).astype(">f4") for _ in range(2)]
    with machine(2) as ends:
        exchanges = [Exchange(end) for end in ends]
        runs = [run_of(plan, rank, array) for rank, array in enumerate(arrays)]
        for exchange, run in zip(exchanges, runs, strict=True):
            exchange.start(run)
        turn(exchanges, runs, anyone())
    assert all(np.array_equal(array, 2 * np.arange(5000)) for array in arrays)


def test_memory_does_not_grow_with_the_number_of_runs_or_of_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Staging and scratch are used again; of sizes only the last ones are remembered."""
    monkeypatch.setattr(scripts, "MOST", 8)
    plan = plan_of("recursive_doubling", 2)
    with machine(2) as ends:
        exchanges = [Exchange(end) for end in ends]
        for size in range(1, 60):
            runs = [run_of(plan, rank, np.ones(size)) for rank in range(2)]
            for exchange, run in zip(exchanges, runs, strict=True):
                exchange.start(run)
            turn(exchanges, runs, anyone())
            assert all((run.array == 2).all() for run in runs)
        for end, exchange in zip(ends, exchanges, strict=True):
            assert len(end._segments.fds) == 2  # the board and one for staging
            assert exchange.scratch.allocated_bytes == 4096
            assert exchange.shared is not None
            assert len(exchange.shared._scripts._known) == 8


def test_gathered_tables_of_any_size_leave_little_memory_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are not cut, so that each is staged as a whole."""
    monkeypatch.setattr(segments, "IDLE_BYTES", 1 << 20)
    plan = plan_of("direct_all_gather", 2)
    with machine(2) as ends:
        exchanges = [Exchange(end) for end in ends]
        for size in range(1, 14):
            tables = [np.zeros((2, size << 18), np.uint8) for _ in range(2)]
            for rank, table in enumerate(tables):
                table[rank] = rank + size
            runs = [run_of(plan, rank, table.reshape(-1)) for rank, table in enumerate(tables)]
            for exchange, run in zip(exchanges, runs, strict=True):
                exchange.start(run)
            turn(exchanges, runs, anyone())
            assert all((table == [[size], [size + 1]]).all() for table in tables)
        for end in ends:
            assert sum(512 * os.fstat(fd).st_blocks for fd in end._segments.fds) < 2 << 20


def test_while_a_run_is_under_way_no_other_is_begun() -> None:
    plan, arrays = plan_of("direct", 2), [np.ones(3), np.ones(3)]
    programs = [compile_program(plan, rank) for rank in range(2)]
    sign = Sign((0,) * SIGN_WORDS, lambda *_: SynclineError("another call"))
    with machine(2) as ends, contextlib.ExitStack() as stack:
        one, two = (Engine(end) for end in ends)
        for engine in (one, two):
            stack.callback(engine.close)
            stack.callback(engine.fail, ClosedError("the test is over"))
        kept = work = None
        memory = weakref.WeakSet()  # what keeps the array alive, in place of a tensor
        deadline = time.monotonic() + LIMIT_S
        while work is None and time.monotonic() < deadline:  # they have to know each other, and nobody to drive
            kept = kept or one.keep(programs[0], arrays[0].dtype, arrays[0].size)
            work = kept and kept.begin(arrays[0].ctypes.data, 0, "first", sign, memory)
        assert kept is not None
        assert work is not None
        assert not work.done
        assert kept.begin(arrays[0].ctypes.data, 1, "second", sign, arrays[0]) is None
        assert not kept.run(arrays[0].ctypes.data, 1, "second", sign, LIMIT_S)
        held = weakref.ref(memory)
        del memory
        assert held() is not None
        two.run(Order(programs[1], arrays[1], 0, "first", sign=sign), LIMIT_S)
        one.wait(work, timeout=LIMIT_S)
        assert all((array == 2).all() for array in arrays)
        gc.collect()
        assert held() is None


@pytest.mark.parametrize("name", ["direct", "ring", "recursive_doubling"])
def test_orders_that_repeat_give_the_same_bits(name: str) -> None:
    """Over arrays in shared memory, which are prepared then, and private ones. Plans with scratch are not prepared."""
    plan, world, count = plan_of(name, 2), 2, 6
    values = [np.random.default_rng(rank).normal(size=1003).astype(np.float32) for rank in range(world)]
    with machine(world) as ends, contextlib.ExitStack() as stack, ThreadPoolExecutor(world) as threads:
        engines = [Engine(end) for end in ends]
        for engine in engines:
            stack.callback(engine.close)
            stack.callback(engine.fail, ClosedError("the test is over"))

        def work(rank: int) -> list[bytes]:
            engine, program, found = engines[rank], compile_program(plan, rank), list[bytes]()
            arrays = [placed(ends[rank], values[rank], shared) for shared in (True, False)]
            for key in range(count):
                for array in arrays:
                    array[:] = values[rank]
                    engine.run(Order(program, array, key % 2, "again"), LIMIT_S)
                    found.append(array.tobytes())
            return found

        found = [bits for rank in threads.map(work, range(world)) for bits in rank]
        assert set(found) == {(values[0] + values[1]).tobytes()}
        kept = [one for engine in engines for one in engine._kept.values() if not isinstance(one, bool)]
        assert len(kept) == (0 if name == "recursive_doubling" else world)


def test_who_was_rung_looks_at_what_was_handed_over_before_it_sleeps_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer and the own process ring the same bell, which says no more than that it was rung."""
    monkeypatch.setattr(exchange_module, "PATIENCE_MS", int(LIMIT_S * 1000))
    plan, handed = plan_of("ring", 3), list[bool]()
    with machine(3) as ends:
        exchanges = [Exchange(end, handed_over=lambda: bool(handed)) for end in ends]
        arrays = [placed(end, np.ones(6), True) for end in ends]
        runs = [[run_of(plan, rank, array, key) for rank, array in enumerate(arrays)] for key in range(2)]
        for exchange, run in zip(exchanges, runs[0], strict=True):
            exchange.start(run)
        turn(exchanges, runs[0], anyone())  # they know each other's memory from here on
        exchanges[0].start(runs[1][0])
        thread = threading.Thread(target=exchanges[0].progress, args=(LIMIT_S,), daemon=True)
        thread.start()
        deadline = time.monotonic() + LIMIT_S
        while ends[0].board[0] != board.ASLEEP and time.monotonic() < deadline:
            pass
        handed.append(True)  # at the moment in which the peer rings
        exchanges[2].start(runs[1][2])
        exchanges[2].progress(0.0)  # goes on when rank 1 comes, and so does rank 0 then
        thread.join(LIMIT_S / 2)
        assert not thread.is_alive()
        exchanges[1].start(runs[1][1])
        turn(exchanges, runs[1], anyone())


def test_threads_that_sleep_while_they_wait_are_always_rung() -> None:
    """Each rank in a thread of its own, in which it sleeps for as long as it likes."""
    plan, count, world = plan_of("direct", 3), 300, 3
    faults: list[BaseException] = []
    with machine(world) as ends:

        def work(end: Shm) -> None:
            exchange = Exchange(end)
            try:
                for key in range(count):
                    run = run_of(plan, end.rank, np.full(key % 7 + 1, end.rank + 1.0), key % 5)
                    exchange.start(run)
                    while not run.done:
                        exchange.progress(4 * LIMIT_S)
                    assert (run.array == 6).all()
            except BaseException as error:
                faults.append(error)
            finish.wait(LIMIT_S)

        finish = threading.Barrier(world)
        threads = [threading.Thread(target=work, args=(end,), daemon=True) for end in ends]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(LIMIT_S)
        assert not any(thread.is_alive() for thread in threads)
    assert faults == []
