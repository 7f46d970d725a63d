"""Checkpoints on disk: sharded over the ranks, written in the background, complete or not there, without pickle.

A checkpoint is a folder of safetensors files, one for each rank, so that ``torch.distributed.checkpoint`` and
``safetensors`` can read its tensors by name. Each file has the SHA-256 of all that it contains, and the name of the
save that it belongs to: a checkpoint counts if all files of one save are there and unaltered. No rank has to commit it,
and a rank that dies while it writes leaves the checkpoint before as the newest.

The state is any nesting of dictionaries, lists, tuples, tensors, arrays and plain values, the same on all ranks. Each
rank writes part of the tensors. Ranks without a common file system read what they have, and tell the others.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import math
import os
import re
import secrets
import shutil
import sys
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from .errors import DataError, MismatchError, UsageError
from .session.session import Session

if TYPE_CHECKING:
    import torch

Bytes = NDArray[np.uint8]

VERSION = 1
_MOST_SHARDS = 99_999
_MOST_STEPS = 10**18
_MOST_HEADER_BYTES = 100_000_000
"""The limit of the format's own reader."""
_MOST_DEPTH = 100
_NO_SUM = "0" * 64
"""Stands for the checksum while it is computed."""

_DTYPES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
"""The element types of the format, with NumPy's and PyTorch's name."""
_NAMES = {name: code for code, name in _DTYPES.items()}

Node = list[Any]
"""A part of the state in JSON: its kind and contents. The kinds are those of ``_Parts.node``."""


@dataclass
class _Leaf:
    """A tensor or array of the state. ``copy`` returns its bytes in memory that nobody changes."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    copy: Callable[[], Bytes]

    @property
    def row(self) -> list[Any]:
        """The properties that must be equal on all ranks."""
        return [self.name, self.dtype, list(self.shape)]


class _Parts:
    """A state taken apart: its leaves, and its structure as JSON."""

    def __init__(self, state: Any) -> None:
        self.leaves: dict[str, _Leaf] = {}
        self._seen: dict[tuple[Any, ...], str] = {}
        self.tree = self._node(state, (), 0)

    def _node(self, value: Any, path: tuple[str, ...], depth: int) -> Node:
        if depth > _MOST_DEPTH:
            raise UsageError(
                f"the state is nested deeper than {_MOST_DEPTH} levels at {_shown(path)}: does it contain itself?"
            )
        if value is None or type(value) in (bool, int, float, str):
            return ["value", value]
        if isinstance(value, Mapping):
            kind = "counter" if type(value) is Counter else "dict"
            return [kind, [self._item(key, item, path, depth) for key, item in value.items()]]
        if type(value) in (list, tuple):
            items = [self._node(item, (*path, str(number)), depth + 1) for number, item in enumerate(value)]
            return [type(value).__name__, items]
        if hasattr(value, "to_local"):
            raise UsageError(f"a checkpoint cannot contain the DTensor at {_shown(path)}: give its full_tensor()")
        if isinstance(value, np.ma.MaskedArray):
            raise UsageError(
                f"a checkpoint cannot contain the masked array at {_shown(path)}: give its data and its mask"
            )
        if isinstance(value, np.ndarray | np.generic):
            kind = "scalar" if isinstance(value, np.generic) else "array"
            return [kind, self._of_array(np.asarray(value), path)]
        if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
            return ["tensor", self._of_tensor(value, path)]
        raise UsageError(
            f"a checkpoint cannot contain the {type(value).__name__} at {_shown(path)}: it takes tensors, arrays,"
            " dictionaries, lists, tuples, strings, numbers and None (objects would need pickle)"
        )

    def _item(self, key: Any, item: Any, path: tuple[str, ...], depth: int) -> list[Any]:
        if type(key) not in (str, int):
            raise UsageError(
                f"a checkpoint cannot contain the key {key!r} at {_shown(path)}: keys are strings or integers"
            )
        return [key, self._node(item, (*path, str(key)), depth + 1)]

    def _of_array(self, array: NDArray[Any], path: tuple[str, ...]) -> str:
        native = array.dtype.newbyteorder("=")
        copy = lambda: np.array(array, native, order="C", copy=True).reshape(-1).view(np.uint8)  # noqa: E731
        where = (array.ctypes.data, array.shape, array.strides, array.dtype.str) if array.nbytes else (path,)
        return self._add(path, array.dtype.name, array.shape, array.nbytes, copy, where)

    def _of_tensor(self, tensor: torch.Tensor, path: tuple[str, ...]) -> str:
        import torch

        if tensor.layout != torch.strided or tensor.is_quantized:
            raise UsageError(f"a checkpoint cannot contain the tensor at {_shown(path)}: it is sparse or quantized")

        def copy() -> Bytes:
            own = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
            found: Bytes = own.view(torch.uint8).numpy()
            return found

        nbytes = tensor.numel() * tensor.element_size()
        where = (str(tensor.device), tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        dtype = str(tensor.dtype).removeprefix("torch.")
        shared = tensor.data_ptr() and not tensor.is_neg() and not tensor.is_conj()
        return self._add(path, dtype, tuple(tensor.shape), nbytes, copy, where if shared else (path,))

    def _add(
        self,
        path: tuple[str, ...],
        dtype: str,
        shape: tuple[int, ...],
        nbytes: int,
        copy: Callable[[], Bytes],
        where: tuple[Any, ...],
    ) -> str:
        """The name of a leaf; of one that shares its memory with an earlier one, as tied weights do, the earlier's."""
        if dtype not in _NAMES:
            raise UsageError(f"a checkpoint cannot contain elements of type {dtype}, as those at {_shown(path)}")
        if where in self._seen:
            return self._seen[where]
        name = wanted = ".".join(path) or "state"
        number = 1
        while name in self.leaves or name == "__metadata__":
            number += 1
            name = f"{wanted}#{number}"  # keys may contain dots
        self.leaves[name] = _Leaf(name, dtype, shape, nbytes, copy)
        self._seen[where] = name
        return name


def _shown(path: Sequence[str]) -> str:
    return "/".join(path) or "its top"


def _whole(tree: Any, leaves: Mapping[str, _Read], made: dict[tuple[str, str], Any]) -> Any:
    """The state from its structure. Leaves that shared their memory do so again. Raises for other JSON."""
    kind, content = tree
    if kind == "value":
        if content is not None and type(content) not in (bool, int, float, str):
            raise ValueError(f"a value of type {type(content).__name__}")
        return content
    if kind in ("dict", "counter"):
        items = {key: _whole(item, leaves, made) for key, item in content}
        return items if kind == "dict" else Counter(items)
    if kind in ("list", "tuple"):
        listed = [_whole(item, leaves, made) for item in content]
        return listed if kind == "list" else tuple(listed)
    if kind not in ("array", "scalar", "tensor"):
        raise ValueError(f"a part of kind {kind!r}")
    if (kind, content) not in made:
        leaf = leaves[content]
        made[kind, content] = (
            leaf.tensor() if kind == "tensor" else leaf.array()[()] if kind == "scalar" else leaf.array()
        )
    return made[kind, content]


@dataclass
class _Read:
    """A leaf that was read."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes

    def array(self) -> NDArray[Any]:
        return self.data.view(_numpy_type(self.dtype)).reshape(self.shape)

    def tensor(self) -> torch.Tensor:
        import torch

        if not self.data.nbytes:
            return torch.empty(self.shape, dtype=getattr(torch, self.dtype))
        return torch.from_numpy(self.data).view(getattr(torch, self.dtype)).reshape(self.shape)


def _numpy_type(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else np.dtype(name)


def packed(state: Any) -> bytes:
    """A state as bytes for other processes of this run. UsageError names the place of an object without such a form."""
    parts = _Parts(state)
    leaves = [[*leaf.row, base64.b64encode(leaf.copy()).decode()] for leaf in parts.leaves.values()]
    return json.dumps([parts.tree, leaves]).encode()


def unpacked(data: bytes) -> Any:
    """The state of ``packed``. Raises ValueError for other data."""
    try:
        tree, leaves = json.loads(data)
        return _whole(tree, {name: _leaf(*row) for name, *row in leaves}, {})
    except MemoryError:
        raise
    except Exception as error:  # the frameworks raise many types for malformed data
        raise ValueError(f"{len(data)} bytes are not a packed state: {error!r:.200}") from error


def _leaf(dtype: str, shape: Sequence[int], text: str) -> _Read:
    data = np.frombuffer(bytearray(base64.b64decode(text)), np.uint8)
    if math.prod(shape) * _numpy_type(dtype).itemsize != data.nbytes:
        raise ValueError(f"{data.nbytes} bytes of type {dtype} and shape {shape}")
    return _Read(dtype, tuple(shape), data)


def shares(sizes: Sequence[int], ranks: int) -> list[list[int]]:
    """For each rank, the numbers of its tensors: the largest go first, to the rank with the fewest bytes."""
    found: list[list[int]] = [[] for _ in range(ranks)]
    bytes_of = [0] * ranks
    for number in sorted(range(len(sizes)), key=lambda number: (-sizes[number], number)):
        rank = min(range(ranks), key=lambda rank: (bytes_of[rank], rank))
        found[rank].append(number)
        bytes_of[rank] += sizes[number]
    return [sorted(share) for share in found]


# Files.


def write_shard(path: Path, about: Mapping[str, Any], leaves: Sequence[tuple[_Leaf, Bytes]]) -> None:
    """Write a file, which appears whole or not at all. OSError if the disk is full, or the folder read-only."""
    table: dict[str, Any] = {}
    at = 0
    for leaf, _ in leaves:
        table[leaf.name] = {
            "dtype": _NAMES[leaf.dtype], "shape": list(leaf.shape), "data_offsets": [at, at + leaf.nbytes],
        }  # fmt: skip
        at += leaf.nbytes
    # The checksum first: other values could contain the text that is replaced by it.
    metadata = {"sha256": _NO_SUM, "format": "pt", "syncline": json.dumps(about)}
    header = json.dumps({"__metadata__": metadata, **table}).encode()
    header += b" " * (-len(header) % 8)
    if len(header) > _MOST_HEADER_BYTES:
        raise UsageError(
            f"the names and plain values of this state take {len(header):,} bytes, at most {_MOST_HEADER_BYTES:,}"
        )
    digest = _digest(header, [data for _, data in leaves])
    header = header.replace(_NO_SUM.encode(), digest.encode(), 1)
    part = path.with_name(f".{path.name}.{about['save']}.part")
    try:
        with part.open("wb") as file:
            file.write(len(header).to_bytes(8, "little") + header)
            for _, data in leaves:
                file.write(memoryview(data))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            part.unlink()
        raise
    for folder in (path.parent, path.parent.parent):  # their entries have to be on the disk, too
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _digest(header: bytes, data: Sequence[Bytes]) -> str:
    found = hashlib.sha256(header)
    for each in data:
        found.update(memoryview(each))
    return found.hexdigest()


def read_about(path: Path) -> dict[str, Any]:
    """The description of a checkpoint in one of its files, without the tensors. DataError for another format."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        return _about(path, size, file.read(min(size, _MOST_HEADER_BYTES)))[0]


def parse_shard(path: Path, raw: Bytes) -> tuple[dict[str, Any], dict[str, _Read]]:
    """The description of a checkpoint in the bytes of a file, and the tensors of that file. ``path`` is for messages.

    Raises DataError if the file is truncated, altered, or of another format.
    """
    size = int.from_bytes(raw[:8].tobytes(), "little")
    header = raw[8 : 8 + min(size, _MOST_HEADER_BYTES)].tobytes()
    about, table, digest = _about(path, size, header)
    data = raw[8 + len(header) :]
    if _digest(header.replace(digest.encode(), _NO_SUM.encode(), 1), [data]) != digest:
        raise DataError(f"{path} is truncated or altered: its SHA-256 differs from the one that it contains")
    found: dict[str, _Read] = {}
    end = 0
    for name, row in table.items():
        try:
            dtype, shape = _DTYPES[row["dtype"]], tuple(map(int, row["shape"]))
            begin, end_of = map(int, row["data_offsets"])
            size = int(np.prod(shape, dtype=object)) * _numpy_type(dtype).itemsize
            if begin != end or end_of - begin != size or min(shape, default=0) < 0 or end_of > data.nbytes:
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            raise DataError(
                f"{path} is not a checkpoint of this format: its tensor {name!r} is not described well"
            ) from None
        end = end_of
        found[name] = _Read(dtype, shape, data[begin:end_of].copy())  # aligned, and free of the other tensors
    return about, found


def _about(path: Path, size: int, header: bytes) -> tuple[dict[str, Any], dict[str, Any], str]:
    """The description of the checkpoint in a header, the table of tensors, and the checksum."""
    if len(header) != size or not size:
        raise DataError(f"{path} is truncated, or not a checkpoint of this format")
    try:
        table = json.loads(header)
        metadata = table.pop("__metadata__")
        about, digest = json.loads(metadata["syncline"]), metadata["sha256"]
        version = about["version"]
        if not re.fullmatch("[0-9a-f]{64}", digest):
            raise ValueError
        save, numbers = about["save"], [about[name] for name in ("step", "number", "shard", "shards")]
        if not re.fullmatch("[0-9a-f]{16}", save) or any(type(number) is not int for number in numbers):
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OverflowError):
        raise DataError(f"{path} is not a checkpoint of this format") from None
    if version != VERSION:
        raise DataError(
            f"{path} has version {version!r} of the format, this Syncline reads {VERSION}: use the one that wrote it"
        )
    step, number, shard, shards = numbers
    if not 0 <= step < _MOST_STEPS or number < 1 or not 0 <= shard < shards <= _MOST_SHARDS:
        raise DataError(f"{path} is not a checkpoint of this format")
    return about, table, digest


# A run's checkpoints.


@dataclass
class _Writing:
    """A file that is being written in the background, and the save that it belongs to."""

    of: _Candidate
    thread: threading.Thread | None = None
    failed: str = ""


class Checkpoints:
    """The checkpoints of a run in a folder, as ``syncline.checkpoints`` documents. All calls are collective.

    ``session`` returns the session of each call: an elastic run goes on in a new one.
    """

    def __init__(self, session: Callable[[], Session], folder: str | os.PathLike[str], keep: int) -> None:
        if keep < 1:
            raise UsageError(f"keep={keep}: at least one checkpoint has to stay")
        if session().world_size > _MOST_SHARDS:
            raise UsageError(f"a checkpoint has at most {_MOST_SHARDS:,} files, one for each rank")
        self._of_call, self._folder, self._keep = session, Path(folder), keep
        self._writing: _Writing | None = None

    @property
    def _session(self) -> Session:
        return self._of_call()

    def save(self, step: int, state: Any) -> None:
        """Write ``state`` as the checkpoint of ``step``. Returns when it is copied; the files are written meanwhile.

        The state must be the same on all ranks. An error of the save before, such as a full disk, is raised here, on
        all ranks. MismatchError if ranks save other steps or tensors.
        """
        error: Exception | None = None
        signature = ""
        try:
            if type(step) is not int or not 0 <= step < _MOST_STEPS:
                raise UsageError(f"step={step!r} must be a whole number from 0")
            parts = _Parts(state)
            rows = json.dumps([step, self._keep, [leaf.row for leaf in parts.leaves.values()]]).encode()
            signature = hashlib.sha256(rows).hexdigest()
        except Exception as found:
            error = found
        answers, known = self._confirm({"signature": signature, "save": secrets.token_hex(8)}, error)
        for rank, said in enumerate(answers):
            if said["signature"] != answers[0]["signature"]:
                raise MismatchError(
                    f"{self._session.name(rank)} saves another step, or tensors of other names, types or shapes, than"
                    " rank 0: the state of a checkpoint must be the same on all ranks"
                )
        number = 1 + max((row.number for rows in known for row in rows), default=0)
        self._begin(_Candidate(number, step, answers[0]["save"], self._session.world_size), parts)

    def _begin(self, save: _Candidate, parts: _Parts) -> None:
        """Copy this rank's part, and write it in a thread. All ranks learn of a failure at their next call."""
        writing = self._writing = _Writing(save)
        rank = self._session.rank
        about = {
            "version": VERSION, **save._asdict(), "shard": rank, "tree": parts.tree if rank == 0 else None,
        }  # fmt: skip
        try:
            leaves = list(parts.leaves.values())
            share = shares([leaf.nbytes for leaf in leaves], save.shards)[rank]
            mine = [(leaves[index], leaves[index].copy()) for index in share]
            thread = threading.Thread(target=self._write, args=(writing, about, mine), name="syncline-checkpoint")
            thread.start()  # not a daemon: the interpreter waits for it
            writing.thread = thread
        except BaseException as error:
            writing.failed = f"step {save.step}: {type(error).__name__}: {error}"
            raise

    def wait(self) -> None:
        """Wait until the last save is complete on all ranks. DataError if a rank could not write its file."""
        self._confirm({})

    def load(self, step: int | None = None) -> tuple[int, Any] | None:
        """The newest complete checkpoint, or that of ``step``: its step and its state. None if there is none.

        The same on all ranks, for any number of ranks. Warns of newer ones that are incomplete or altered. DataError if
        there is none of ``step``.
        """
        _, known = self._confirm({})
        problem = f"{self._folder} has no checkpoint of step {step}"
        for candidate in _candidates(known, step):
            problem, state = self._read(candidate, known)
            if not problem:
                return candidate.step, state
            if self._session.rank == 0 and step is None:
                warnings.warn(f"{problem}; taking the checkpoint before", stacklevel=2)
        if step is not None:
            raise DataError(problem)
        return None

    def _confirm(
        self, more: Mapping[str, Any], error: Exception | None = None
    ) -> tuple[list[dict[str, Any]], list[list[_Found]]]:
        """Wait for the last save, and exchange ``more``. Returns what the ranks said, and the files that each sees.

        Raises what went wrong on any rank, on all of them: ``error`` on this one.
        """
        writing, self._writing = self._writing, None
        if writing is not None and writing.thread is not None:
            writing.thread.join()
        failed = "" if error is None else f"could not save a checkpoint: {error}"
        if writing is not None and writing.failed:
            failed = f"could not write a checkpoint: {writing.failed}"
        said = {"failed": failed, "found": self._found(), **more}
        answers = [json.loads(each) for each in self._session.gather(json.dumps(said).encode())]
        if error is not None:
            raise error
        for rank, answer in enumerate(answers):
            if answer["failed"]:
                raise DataError(f"{self._session.name(rank)} {answer['failed']}")
        known = [[_Found(*row) for row in answer["found"]] for answer in answers]
        if writing is not None:
            self._finish(writing.of, known)
        return answers, known

    def _finish(self, saved: _Candidate, known: Sequence[Sequence[_Found]]) -> None:
        """Remove old checkpoints, now that all ranks have written ``saved``; all ranks choose the same ones."""
        if missing := _missing(saved, known):
            lost = f"{self._path(saved)} is incomplete: no rank has {missing}"
            if saved.shards == self._session.world_size:
                raise DataError(lost)
            warnings.warn(f"{lost}, which a worker that is gone should have written", stacklevel=4)
            return
        whole = [one for one in _candidates(known, None) if not _missing(one, known)]
        for old in _candidates(known, None):
            if old not in whole[: self._keep] and old.number < saved.number:
                shutil.rmtree(self._path(old), ignore_errors=True)  # other ranks may do the same

    def _path(self, save: _Candidate) -> Path:
        """The folder of a save. Its name is never used again, so no save can damage another one."""
        return self._folder / f"step-{save.step}-{save.save}"

    def _write(self, writing: _Writing, about: Mapping[str, Any], mine: Sequence[tuple[_Leaf, Bytes]]) -> None:
        """Runs in a thread of its own."""
        folder = self._path(writing.of)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            write_shard(folder / _file_name(about["shard"], about["shards"]), about, mine)
        except Exception as error:
            why = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
            writing.failed = f"step {about['step']} in {folder}: {why}"

    def _found(self) -> list[_Found]:
        """The files that this rank sees."""
        found: list[_Found] = []
        for path in self._folder.glob("step-*/shard-*.safetensors"):
            with contextlib.suppress(DataError, OSError):  # counts as missing, which is reported
                about = read_about(path)
                row = _Found(*(about[name] for name in _Found._fields))
                if path == self._path(row.of) / _file_name(row.shard, row.shards):
                    found.append(row)
        return sorted(found)

    def _read(self, candidate: _Candidate, known: Sequence[Sequence[_Found]]) -> tuple[str, Any]:
        """The fault of a checkpoint on any rank, or its state."""
        if missing := _missing(candidate, known):
            return f"{self._path(candidate)} is incomplete: no rank has {missing}", None
        have = [{row.shard for row in rows if row.of == candidate} for rows in known]
        common = all(len(mine) == candidate.shards for mine in have)
        leaves: dict[str, _Read] = {}
        tree: Any = None
        problem = ""
        for shard in range(candidate.shards):
            path = self._path(candidate) / _file_name(shard, candidate.shards)
            # In a loop of collectives all ranks go on to its end, whatever is wrong on one of them.
            raw = None if common else self._told(min(rank for rank, mine in enumerate(have) if shard in mine), path)
            if problem:
                continue
            try:
                about, found = parse_shard(path, np.fromfile(path, np.uint8) if raw is None else raw)
                if _Found(*(about[name] for name in _Found._fields)) != (*candidate, shard):
                    raise DataError(f"{path} belongs to another save")
                leaves |= found
                tree = about["tree"] if shard == 0 else tree
            except Exception as error:
                problem = str(error) or type(error).__name__
        state: Any = None
        try:
            state = None if problem else _whole(tree, leaves, {})
        except Exception as error:
            problem = f"{self._path(candidate)} is not a checkpoint of this format: {error}"
        problems = [json.loads(said) for said in self._session.gather(json.dumps(problem).encode())]
        worst = next((f"{self._session.name(rank)}: {said}" for rank, said in enumerate(problems) if said), "")
        return (worst, None) if worst else ("", state)

    def _told(self, owner: int, path: Path) -> Bytes:
        """The bytes of a file that ``owner`` has."""
        raw = b""
        if self._session.rank == owner:
            with contextlib.suppress(OSError):  # all ranks find that it is truncated
                raw = path.read_bytes()
        return np.frombuffer(self._session.tell_all(raw, owner), np.uint8)


class _Candidate(NamedTuple):
    """A save in a folder: its number among all saves, its step, its name and its number of files."""

    number: int
    step: int
    save: str
    shards: int


class _Found(NamedTuple):
    """A file that a rank sees, and the save that it belongs to."""

    number: int
    step: int
    save: str
    shards: int
    shard: int

    @property
    def of(self) -> _Candidate:
        """The save that the file belongs to."""
        return _Candidate(*self[:-1])


def _missing(save: _Candidate, known: Sequence[Sequence[_Found]]) -> str:
    """The first files of a save that no rank has."""
    there = {row.shard for rows in known for row in rows if row.of == save}
    left = [shard for shard in range(save.shards) if shard not in there]
    return ", ".join(_file_name(shard, save.shards) for shard in left[:3])


def _file_name(shard: int, shards: int) -> str:
    return f"shard-{shard:05}-of-{shards:05}.safetensors"


def _candidates(known: Sequence[Sequence[_Found]], step: int | None) -> list[_Candidate]:
    """The saves that any rank has files of, the newest first."""
    found = {row.of for rows in known for row in rows}
    return sorted((one for one in found if step in (None, one.step)), reverse=True)
