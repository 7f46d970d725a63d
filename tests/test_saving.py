"""Checkpoints on disk: whole or not there, the same for any number of ranks, readable by others, never by pickle."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from syncline import saving
from syncline.errors import DataError, MismatchError, UsageError
from syncline.saving import _MOST_DEPTH, Checkpoints, parse_shard, shares
from syncline.session.session import Session
from threads import run_group

TYPES = [
    "bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64", "float16", "float32", "float64",
    ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2,
]  # fmt: skip


def on(world: int, body: Callable[[Checkpoints, Session], Any], folder: Path, keep: int = 2) -> list[Any]:
    return run_group("ring", world, lambda session: body(Checkpoints(lambda: session, folder, keep), session))


def saved(folder: Path, world: int, *saves: tuple[int, Any], keep: int = 2) -> None:
    def body(store: Checkpoints, _: Session) -> None:
        for step, state in saves:
            store.save(step, state)
        store.wait()

    on(world, body, folder, keep)


def loaded(folder: Path, world: int, step: int | None = None) -> Any:
    """What all ranks get, once."""
    found = on(world, lambda store, _: store.load(step), folder)
    assert all(same(found[0], one) for one in found)
    return found[0]


def folder_of(folder: Path, step: int) -> Path:
    (found,) = folder.glob(f"step-{step}-*")
    return found


def same(one: Any, other: Any) -> bool:
    """Equal in structure, types and bits."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if hasattr(one, "numel"):
        import torch

        raw = [tensor.reshape(-1).contiguous().view(torch.uint8) for tensor in (one, other)]
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(*raw)
    return bool(one == other or (one != one and other != other))


STATE = {
    "weights": {"first.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "first.bias": np.zeros(0, np.float16)},
    "optimizer": {"state": {0: {"step": 3, "momentum": np.ones((2, 2))}, 1: None}, "groups": [{"lr": 0.1, "on": True}]},
    "shape": (1, "text", float("inf")),
    "scalar": np.array(7, np.int64),
    "rate": np.float64(0.1),
    "milestones": Counter({3: 1, 5: 2}),
}


@pytest.mark.parametrize(("before", "after"), [(1, 1), (1, 3), (3, 1), (3, 2), (5, 4)])
def test_a_state_comes_back_as_it_was_for_any_number_of_ranks(tmp_path: Path, before: int, after: int) -> None:
    saved(tmp_path / "new" / "folder", before, (7, STATE))
    step, state = loaded(tmp_path / "new" / "folder", after)
    assert step == 7
    assert same(state, STATE)
    names = sorted(path.name for path in folder_of(tmp_path / "new" / "folder", 7).iterdir())
    assert names == [f"shard-{rank:05}-of-{before:05}.safetensors" for rank in range(before)]


arrays = st.builds(
    lambda dtype, shape, seed: np.frombuffer(
        np.random.default_rng(seed).bytes(int(np.prod(shape)) * np.dtype(dtype).itemsize), np.dtype(dtype)
    ).reshape(shape),
    st.sampled_from(TYPES[1:]),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    st.integers(0, 100),
)
states = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | arrays,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text(max_size=3) | st.integers(), inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(max_examples=30)
@given(states)
def test_every_state_of_arrays_and_plain_values_comes_back(tmp_path_factory: Any, state: Any) -> None:
    folder = tmp_path_factory.mktemp("state")
    saved(folder, 1, (0, state))
    assert same(loaded(folder, 1), (0, state))


def test_arrays_of_the_other_byte_order_keep_their_values(tmp_path: Path) -> None:
    saved(tmp_path, 1, (1, {"a": np.arange(3, dtype=">f4")}))
    assert loaded(tmp_path, 1)[1]["a"].tolist() == [0, 1, 2]


def test_tensors_of_every_type_come_back_and_tied_ones_are_stored_once(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    tied = torch.nn.Parameter(torch.randn(5, 3))
    state: dict[str, Any] = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.float16, torch.float8_e5m2)
    }
    state |= {"scalar": torch.tensor(2.5), "none": torch.zeros(0, 3), "turned": torch.randn(3, 4).t()}
    state |= {"in": tied, "out": tied, "part": torch.randn(9)[2:5]}
    saved(tmp_path, 2, (1, state))
    found = loaded(tmp_path, 3)[1]
    wanted = {name: tensor.detach() if tensor is not tied else tied.detach() for name, tensor in state.items()}
    assert same(found, wanted)
    assert found["in"] is found["out"]
    size = sum(path.stat().st_size for path in folder_of(tmp_path, 1).iterdir())
    assert size < 3000


def test_a_save_returns_before_the_files_are_there_and_later_changes_are_not_in_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, both, write = threading.Event(), threading.Barrier(2, timeout=20), saving.write_shard
    monkeypatch.setattr(saving, "write_shard", lambda *given: (go.wait(20), write(*given)))

    def body(store: Checkpoints, _: Session) -> None:
        weights = np.zeros(1000)
        store.save(1, {"weights": weights})
        weights += 1
        assert not list(tmp_path.glob("step-1-*/shard*"))
        both.wait()
        go.set()
        store.wait()

    on(2, body, tmp_path)
    assert not loaded(tmp_path, 1)[1]["weights"].any()


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_checkpoints_stay_whatever_their_steps(tmp_path: Path, keep: int) -> None:
    """A run that goes back to an earlier step saves newer checkpoints of smaller steps."""
    steps = [10, 20, 30, 15, 25]
    saved(tmp_path, 2, *((step, {"step": step}) for step in steps), keep=keep)
    assert sorted(path.name.rpartition("-")[0] for path in tmp_path.iterdir()) == sorted(
        f"step-{step}" for step in steps[-keep:]
    )
    assert loaded(tmp_path, 2) == (25, {"step": 25})
    saved(tmp_path, 3, (5, {"step": 5}), keep=keep)
    assert loaded(tmp_path, 1) == (5, {"step": 5})


def test_the_same_step_may_be_saved_again_and_a_save_that_breaks_off_damages_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 3, (4, {"a": np.zeros(4)}), keep=1)
    saved(tmp_path, 2, (4, {"a": np.ones(4)}), keep=1)
    assert len(list(folder_of(tmp_path, 4).iterdir())) == 2
    write = saving.write_shard

    def half(path: Path, about: Any, leaves: Any) -> None:
        if about["shard"] == 1:
            raise OSError(28, os.strerror(28))
        write(path, about, leaves)

    monkeypatch.setattr(saving, "write_shard", half)
    with pytest.raises(DataError, match=r"rank 1.*could not write a checkpoint: step 4 .*No space left"):
        saved(tmp_path, 2, (4, {"a": np.zeros(4)}), keep=1)
    with pytest.warns(UserWarning, match="incomplete"):
        assert loaded(tmp_path, 1)[1]["a"].all()


def test_ranks_that_remove_old_checkpoints_at_different_times_keep_the_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A slow rank removes what was old when all met, not what a fast one has begun since."""
    finish = Checkpoints._finish

    def slow(store: Checkpoints, *given: Any) -> None:
        if store._session.rank == 0:
            time.sleep(0.2)
        finish(store, *given)

    monkeypatch.setattr(Checkpoints, "_finish", slow)

    saved(tmp_path, 2, (1, {"a": 1}), (2, {"a": 2}), (3, {"a": 3}), keep=1)
    assert [path.name.rpartition("-")[0] for path in tmp_path.iterdir()] == ["step-3"]


def test_a_copy_that_fails_on_one_rank_removes_nothing_and_is_told_to_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, 2, (1, {"a": 1}), keep=1)

    def body(store: Checkpoints, session: Session) -> None:
        if session.rank == 1:
            monkeypatch.setattr(store, "_write", None)
            monkeypatch.setattr(saving, "shares", lambda *_: [[0], [9]])
            with pytest.raises(IndexError):
                store.save(2, {"a": np.zeros(3)})
        else:
            store.save(2, {"a": np.zeros(3)})
        with pytest.raises(DataError, match=r"rank 1.*could not write a checkpoint: step 2: IndexError"):
            store.wait()

    on(2, body, tmp_path, keep=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert loaded(tmp_path, 1)[0] == 1


def test_two_objects_on_one_folder_count_on(tmp_path: Path) -> None:
    def body(store: Checkpoints, session: Session) -> None:
        other = Checkpoints(lambda: session, tmp_path, 1)
        for number, one in enumerate((other, store, store, store, other)):
            one.save(number, {"number": number})
            one.wait()

    on(2, body, tmp_path, keep=1)
    assert loaded(tmp_path, 1) == (4, {"number": 4})


@pytest.mark.parametrize("how", ["missing", "truncated", "altered", "empty", "of another save"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_checkpoint_that_is_not_whole_is_passed_over_by_all_ranks(tmp_path: Path, how: str, world: int) -> None:
    big = np.arange(10_000, dtype=np.float64)
    saved(tmp_path, 2, (1, {"a": big, "b": big * 2}), (2, {"a": big + 1, "b": big * 3}))
    path = folder_of(tmp_path, 2) / "shard-00001-of-00002.safetensors"
    whole = path.read_bytes()
    if how == "missing":
        path.unlink()
    elif how == "of another save":
        saved(tmp_path / "other", 2, (2, {"a": big, "b": big}))
        (folder_of(tmp_path / "other", 2) / path.name).replace(path)
    else:
        middle = len(whole) // 2
        altered = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes({"truncated": whole[:-1], "altered": altered, "empty": b""}[how])
    with pytest.warns(UserWarning, match=r"step-2.*; taking the checkpoint before") as told:
        step, state = loaded(tmp_path, world)
    assert (step, bool(state["a"][0])) == (1, False)
    assert len(told) == 1
    with pytest.raises(DataError, match="step-2"):
        loaded(tmp_path, world, 2)


def test_without_any_there_is_nothing_to_load(tmp_path: Path) -> None:
    assert loaded(tmp_path, 2) is None
    assert loaded(tmp_path / "nowhere", 1) is None
    (tmp_path / "step-1-x").mkdir()
    (tmp_path / "step-2-0").write_text("no folder")
    assert loaded(tmp_path, 1) is None
    with pytest.raises(DataError, match="has no checkpoint of step 3"):
        loaded(tmp_path, 1, 3)


def test_ranks_without_a_common_file_system_tell_each_other_what_they_have(tmp_path: Path) -> None:
    """Also when fewer ranks come back, of which one has the files of two."""
    state = {"a": np.arange(100), "b": np.ones(50), "c": np.zeros(3)}
    run_group(
        "ring", 3, lambda session: alone_in(session, tmp_path, lambda store: (store.save(1, state), store.wait()))
    )
    assert [len(list(folder_of(tmp_path / str(rank), 1).iterdir())) for rank in range(3)] == [1, 1, 1]
    (shard,) = folder_of(tmp_path / "2", 1).iterdir()
    shard.rename(folder_of(tmp_path / "0", 1) / shard.name)
    for step, found in run_group("ring", 2, lambda session: alone_in(session, tmp_path, lambda store: store.load())):
        assert step == 1
        assert same(found, state)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert run_group("ring", 1, lambda session: alone_in(session, tmp_path, lambda store: store.load())) == [None]


def alone_in(session: Session, folder: Path, call: Callable[[Checkpoints], Any]) -> Any:
    return call(Checkpoints(lambda: session, folder / str(session.rank), 2))


def test_a_full_disk_leaves_no_part_of_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, os.strerror(28))

    def body(store: Checkpoints, _: Session) -> None:
        store.save(1, {"a": np.ones(10)})
        store.wait()

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DataError, match="No space left on device"):
        on(2, body, tmp_path)
    assert not list(folder_of(tmp_path, 1).iterdir())


@pytest.mark.parametrize("differs", [{"a": np.zeros(3)}, {"b": np.zeros(2)}, {"a": np.zeros(2, np.float32)}])
def test_ranks_that_save_other_tensors_are_told_so(tmp_path: Path, differs: dict[str, Any]) -> None:
    def body(store: Checkpoints, session: Session) -> None:
        store.save(1, differs if session.rank == 1 else {"a": np.zeros(2)})

    with pytest.raises(MismatchError, match=r"rank 1.* saves another step, or tensors of other names"):
        on(2, body, tmp_path)
    with pytest.raises(MismatchError, match="rank 1"):
        on(2, lambda store, session: store.save(session.rank, {}), tmp_path)


def nested(depth: int) -> Any:
    found: Any = 1
    for _ in range(depth):
        found = [found]
    return found


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"a": {"b": object()}}, "cannot contain the object at a/b"),
        ({"a": {1.5: 2}}, r"cannot contain the key 1\.5 at a"),
        ({"a": np.zeros(2, np.complex64)}, "elements of type complex64, as those at a"),
        ({"a": np.array(["text"])}, "elements of type str"),
        ({"a": np.array([object()])}, "elements of type object"),
        (nested(_MOST_DEPTH + 1), "nested deeper than 100 levels"),
        ({"a": np.ma.array([1, 2])}, "cannot contain the masked array at a"),
        ({"a": b"bytes"}, "cannot contain the bytes at a"),
    ],
)
def test_what_no_checkpoint_can_contain_is_named_with_its_place(tmp_path: Path, state: Any, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        saved(tmp_path, 1, (0, state))


def test_the_deepest_state_comes_back(tmp_path: Path) -> None:
    saved(tmp_path, 1, (0, nested(_MOST_DEPTH)))
    assert loaded(tmp_path, 1) == (0, nested(_MOST_DEPTH))


@pytest.mark.parametrize("step", [-1, 10**18, 1.0, True])
def test_a_step_is_a_whole_number(tmp_path: Path, step: Any) -> None:
    with pytest.raises(UsageError, match="must be a whole number from 0"):
        saved(tmp_path, 1, (step, {}))


def test_the_largest_step_is_saved_and_at_least_one_checkpoint_stays(tmp_path: Path) -> None:
    saved(tmp_path, 1, (10**18 - 1, {"a": 1}))
    assert loaded(tmp_path, 1) == (10**18 - 1, {"a": 1})
    with pytest.raises(UsageError, match="keep=0"):
        saved(tmp_path, 1, keep=0)


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 9))
def test_every_tensor_has_one_rank_and_the_shares_are_nearly_equal(sizes: list[int], ranks: int) -> None:
    found = shares(sizes, ranks)
    assert sorted(number for share in found for number in share) == list(range(len(sizes)))
    loads = [sum(sizes[number] for number in share) for share in found]
    assert max(loads) - min(loads) <= max(sizes, default=0)


# Files.


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("shard")
    saved(folder, 1, (3, STATE))
    return next(folder_of(folder, 3).iterdir()).read_bytes()


@given(st.data())
def test_bytes_of_a_file_that_are_changed_lost_or_added_are_found(shard: bytes, data: st.DataObject) -> None:
    changed = bytearray(shard)
    place = data.draw(st.integers(0, len(shard) - 1))
    how = data.draw(st.sampled_from(["change", "lose", "add", "cut"]))
    if how == "change":
        changed[place] ^= data.draw(st.integers(1, 255))
    elif how == "lose":
        del changed[place]
    elif how == "add":
        changed.insert(place, data.draw(st.integers(0, 255)))
    else:
        del changed[place:]
    with pytest.raises(DataError, match=r"^a file "):
        parse_shard(Path("a file"), np.frombuffer(bytes(changed), np.uint8))


def signed(about: Any, table: Any, data: bytes = b"") -> np.ndarray[Any, Any]:
    """A file with a right checksum, whatever it says."""
    text = about if isinstance(about, str) else json.dumps(about)
    header = json.dumps({"__metadata__": {"sha256": "0" * 64, "syncline": text}, **table}).encode()
    digest = hashlib.sha256(header + data).hexdigest()
    header = header.replace(b"0" * 64, digest.encode(), 1)
    return np.frombuffer(len(header).to_bytes(8, "little") + header + data, np.uint8)


ABOUT = {"version": 1, "step": 1, "save": "0" * 16, "number": 1, "shard": 0, "shards": 1, "tree": ["value", None]}


@pytest.mark.parametrize(
    ("about", "table", "says"),
    [
        (ABOUT | {"version": 2}, {}, "version 2 of the format, this Syncline reads 1"),
        (ABOUT | {"shard": 1}, {}, "not a checkpoint"),
        (ABOUT | {"save": "../../etc"}, {}, "not a checkpoint"),
        (ABOUT | {"number": float("inf")}, {}, "not a checkpoint"),
        (ABOUT | {"step": "1"}, {}, "not a checkpoint"),
        (ABOUT, {"a": {"dtype": "F32", "shape": [float("inf")], "data_offsets": [0, 4]}}, "'a' is not described well"),
        ("[" * 100_000, {}, "not a checkpoint"),
        (ABOUT, {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, "'a' is not described well"),
        (ABOUT, {"a": {"dtype": "F32", "shape": [-1, -1], "data_offsets": [0, 4]}}, "'a' is not described well"),
        (ABOUT, {"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 4]}}, "'a' is not described well"),
        (ABOUT, {"a": {"dtype": "F32", "shape": [2**62, 2**62], "data_offsets": [0, 4]}}, "'a' is not described well"),
        (ABOUT, {"a": {"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}}, "'a' is not described well"),
        (ABOUT, {"a": []}, "'a' is not described well"),
    ],
)
def test_a_hostile_file_is_refused_though_its_checksum_is_right(about: Any, table: Any, says: str) -> None:
    with pytest.raises(DataError, match=says):
        parse_shard(Path("a file"), signed(about, table, bytes(4)))


@pytest.mark.parametrize(
    "tree",
    [
        None,
        [],
        ["value"],
        ["value", [1]],
        ["array", "nothing"],
        ["code", "import os"],
        ["dict", [1]],
        "[" * 5000 + "1" + "]" * 5000,
    ],
)
def test_a_structure_that_no_state_has_is_refused(tmp_path: Path, tree: Any) -> None:
    (tmp_path / f"step-1-{ABOUT['save']}").mkdir()
    text = tree if isinstance(tree, str) else json.dumps(tree)
    about = json.dumps(ABOUT | {"tree": 0}).replace('"tree": 0', f'"tree": {text}')
    signed(about, {}).tofile(tmp_path / f"step-1-{ABOUT['save']}" / "shard-00000-of-00001.safetensors")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert loaded(tmp_path, 1) is None


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:torch.distributed is")
def test_others_read_the_tensors_by_name(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    safe = pytest.importorskip("safetensors.torch")
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    saved(tmp_path, 2, (1, {"model": model.state_dict()}))
    found: dict[str, Any] = {}
    for path in folder_of(tmp_path, 1).iterdir():
        found |= safe.load_file(path)
    wanted = {f"model.{name}": tensor for name, tensor in model.state_dict().items()}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)
    read = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    dcp.load(read, storage_reader=HuggingFaceStorageReader(str(folder_of(tmp_path, 1))), no_dist=True)
    assert all(torch.equal(read[name], wanted[name]) for name in wanted)
