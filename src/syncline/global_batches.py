"""Global batches: the samples of a step are the same for any number of workers, and a position counts finished steps.

With global batches of B samples, step k of an epoch trains on the samples at positions k B to (k + 1) B of its order,
whatever the number of workers. Each worker takes a contiguous part of them. A run may therefore continue with another
number of workers at any step: every sample is used once per epoch, and steps use the same samples in the same order.
The position is that of the last committed step. A loader that fetches ahead does not move it.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from .errors import NotBuiltError, UsageError
from .launch.environment import REPEATS
from .sampling import PoolBatches, SampleOrder, check_epoch
from .session.session import Session

SAMPLES = "SYNCLINE_SAMPLES"
"""The environment variable with the file for the samples of committed steps."""


def share(batch: NDArray[np.int64], rank: int, world: int) -> NDArray[np.int64]:
    """A worker's part of a global batch: the parts are contiguous, and their sizes differ by one at most.

    If there are fewer samples than workers, every worker takes the whole batch. The mean over the workers is then the
    mean over the batch too, and no worker is left without a gradient.
    """
    size = len(batch)
    return batch if size < world else batch[size * rank // world : size * (rank + 1) // world]


class SampleLog:
    """Appends the samples of each committed step to a file, a line of JSON each; the worker of rank 0 ``writes``.

    Where each push is an update by itself, every worker writes its own steps.

    A step that was repeated after the loss of a worker may have several lines: the last one of the last view counts.
    ``how`` describes the exchange of these steps: view, strategy, algorithms, and the workers' hosts (``nodes``).
    """

    def __init__(
        self, path: str, sampler: int, members: Sequence[int], writes: bool, how: Mapping[str, Any] | None = None
    ) -> None:
        self._path, self.writes = path, writes
        self._head = {"sampler": sampler, "members": list(members), "view": 1, "nodes": [], **(how or {})}
        self._begun = False

    def write(self, epoch: int, step: int, samples: NDArray[np.int64] | Sequence[int]) -> None:
        """Append a line for a step and its samples."""
        listed = np.asarray(samples).tolist()
        line = json.dumps({**self._head, "epoch": epoch, "step": step, "samples": listed}) + "\n"
        with Path(self._path).open("ab+") as file:
            if not self._begun and file.tell() and _last_byte(file) != b"\n":  # the last writer was killed in a line
                line = "\n" + line
            file.write(line.encode())
        self._begun = True


_BEGIN = '{"sampler": '
"""What each line begins with."""


def _last_byte(file: BinaryIO) -> bytes:
    file.seek(-1, os.SEEK_END)
    return file.read(1)


def read_log(path: str) -> dict[tuple[int, int], dict[str, Any]]:
    """The lines of a ``SampleLog`` by epoch and step: of each the last one of the last view.

    The lines may be those of several files, in which workers of several launchers have written in turn. A line that
    ends early is left out: its writer was killed, and another worker has written the step again. Raises UsageError for
    another file, and NotBuiltError for several samplers.
    """
    found: dict[tuple[int, int], dict[str, Any]] = {}
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a file of syncline run --samples: {error}") from error
    for number, text in enumerate(lines, 1):
        try:
            line = json.loads(text)
        except (ValueError, RecursionError):
            line, begun = None, text.rfind(_BEGIN)
            if text.startswith("{") and not text.endswith("}"):
                continue
            if begun > 0:  # after the line of a writer that was killed, the first one of another file
                with suppress(ValueError, RecursionError):
                    line = json.loads(text[begun:])
        if not _is_line(line):
            raise UsageError(f"line {number} of {path} was not written by syncline run --samples")
        if line["sampler"]:
            raise NotBuiltError(f"{path} has the steps of several samplers: only those of one can be repeated")
        before = found.get((line["epoch"], line["step"]), line)
        if line["view"] >= before["view"]:
            found[line["epoch"], line["step"]] = line
    return found


def _is_line(line: Any) -> bool:
    """Whether decoded JSON has the fields of a line, with values of their types."""
    if not isinstance(line, dict):
        return False
    numbers: list[Any] = [line.get(name) for name in ("sampler", "epoch", "step", "view")]
    lists: list[Any] = [line.get(name) for name in ("members", "samples", "nodes", "algorithms")]
    if not all(isinstance(one, list) for one in lists) or not isinstance(line.get("strategy"), str):
        return False
    members, samples, nodes, algorithms = lists
    return (
        bool(members)
        and len(nodes) in (0, len(members))
        and all(type(number) is int for number in (*numbers, *members, *samples, *nodes))
        and all(isinstance(one, list) and [type(value) for value in one] == [int, str] for one in algorithms)
    )


class GlobalBatches:
    """A worker's parts of global batches, for ``DataLoader(dataset, batch_sampler=)``, and the position in them.

    An iteration begins at the position and ends with the epoch. ``commit`` moves the position on: call it after every
    ``optimizer.step()``. The next iteration yields batches again that no ``commit`` has counted, so a
    failed step is repeated. ``state_dict`` has the position. It can be loaded by any number of workers.

    ``check`` is called before an iteration if workers get parts of different sizes. ``log`` gets the committed steps.
    """

    pooled = False
    """As in ``Sampler``."""

    def __init__(
        self,
        order: SampleOrder,
        rank: int,
        world: int,
        check: Callable[[], None] = lambda: None,
        log: SampleLog | None = None,
    ) -> None:
        self.order, self._rank, self._world = order, rank, world
        self._check, self._log = check, log
        self._kept: tuple[int, NDArray[np.int64]] | None = None  # an epoch and its order
        self._made: tuple[int, int, int, SampleLog | None] | None = None
        """The last commit: its epoch, its first step, the one after, and the log of its workers."""
        self._weighs = False  # whether a model takes its weights from here
        self._start = 0, 0  # the position that the script has begun at or moved to
        self.before_batch: Callable[[], None] | None = None
        """Called before each batch of a worker that is alone and that others may join."""
        self._place(0, 0)

    def divide(
        self, state: Mapping[str, Any], rank: int, world: int, check: Callable[[], None], log: SampleLog | None
    ) -> None:
        """Continue at the position of ``state_dict`` with the parts of another rank and world.

        Its last steps are logged again with the workers that have made them: the one that wrote may have been lost
        before.
        """
        start, mine = self._start, (self.epoch, self.step)
        self.load_state_dict(state)
        self._start = start
        if log is not None and log.writes and (self.epoch, self.step) > start:
            epoch, end = (self.epoch, self.step) if self.step else (self.epoch - 1, self.order.steps)
            first, made = end - 1, self._log
            if self._made is not None and mine == (self.epoch, self.step):  # else others were a step ahead
                epoch, first, end, made = self._made
            assert made is not None
            for step in range(first, end):
                made.write(epoch, step, self._batch(epoch, step))
        self._rank, self._world, self._check, self._log = rank, world, check, log

    def mark(self) -> Callable[[], None]:
        """Remember the position. The returned call goes back to it."""
        kept = self.epoch, self.step, self._start, self._made

        def go_back() -> None:
            epoch, step, start, made = kept
            self._place(epoch, step)
            self._start, self._made = start, made

        return go_back

    def _place(self, epoch: int, step: int) -> None:
        self.epoch, self.step = epoch, step
        self._yielded, self._exhausted = step, False  # of the present epoch
        self._walking: object = None  # the iteration that counts

    def __len__(self) -> int:
        return self.order.steps

    def __iter__(self) -> Iterator[list[int]]:
        if self._exhausted:
            raise UsageError(
                f"sampler(): {self.order.steps - self.step} of the {self.order.steps} batches of epoch {self.epoch}"
                " were used, but no commit() counts them: call sampler.commit() after every optimizer.step(); to use"
                " them again, call sampler.load_state_dict(sampler.state_dict())"
            )
        if self._uneven():
            self._check()
        self._walking = walk = object()
        return self._walk(walk, self.epoch, self.step)

    def _walk(self, walk: object, epoch: int, first: int) -> Iterator[list[int]]:
        for step in range(first, self.order.steps):
            if self.before_batch is not None:
                self.before_batch()
            batch = self._batch(epoch, step)
            if walk is self._walking:
                self._yielded = max(self._yielded, step + 1)
            yield share(batch, self._rank, self._world).tolist()
        self._exhausted |= walk is self._walking

    def _uneven(self) -> bool:
        """Whether workers have parts of different sizes in any step of an epoch."""
        order, batch = self.order, self.order.global_batch
        assert batch is not None
        sizes = {min(batch, order.samples), *([] if order.drop_last else [order.samples % batch])}
        return any(size >= self._world and size % self._world for size in sizes)

    def weigh(self) -> float:
        """This worker's weight in the present step: the number of samples of its part. Each step is then one batch."""
        self._weighs = True
        return float(len(share(self._batch(self.epoch, self.step), self._rank, self._world)))

    def _batch(self, epoch: int, step: int) -> NDArray[np.int64]:
        """All samples of a step."""
        if self._kept is None or self._kept[0] != epoch:
            self._kept = epoch, self.order.indices(epoch)
        batch = self.order.global_batch
        assert batch is not None
        return self._kept[1][step * batch : (step + 1) * batch]

    def commit(self, steps: int = 1) -> None:
        """Count the next step as done: the weights contain it. With gradient accumulation, count several at once.

        Raises UsageError for steps that no iteration has yielded.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise UsageError(f"commit() takes a number of steps from 1, got {steps!r}")
        if steps > 1 and self._weighs:
            raise UsageError(
                f"commit({steps}): weight='batch' of this framework counts one batch in each step, and several have"
                " the weight of the first: commit after every batch, or leave weight= out"
            )
        if self.step + steps > self._yielded:
            raise UsageError(
                f"commit() of {steps} after step {self.step} of epoch {self.epoch}, but only"
                f" {self._yielded - self.step} of its batches were used since: call it once after each"
                " optimizer.step(), with commit(k) for a step of k batches, and at the latest at the end of an epoch"
            )
        if self._log is not None and self._log.writes:
            for step in range(self.step, self.step + steps):
                self._log.write(self.epoch, step, self._batch(self.epoch, step))
        self._made = self.epoch, self.step, self.step + steps, self._log
        self.step += steps
        if self.step == self.order.steps:
            self._place(self.epoch + 1, 0)

    @property
    def where(self) -> str:
        """The step and its epoch, for messages."""
        return f"step {self.step} of epoch {self.epoch}"

    def set_epoch(self, epoch: int) -> None:
        """Move to the beginning of that epoch, counted from 0. In the present epoch the position stays."""
        check_epoch(epoch)
        if epoch != self.epoch:
            self._place(epoch, 0)
            self._start = epoch, 0

    def state_dict(self) -> dict[str, Any]:
        """The position after the last committed step, for a checkpoint; equal on all workers."""
        return {**asdict(self.order), "epoch": self.epoch, "step": self.step, "digest": self._digest(self.epoch)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue at the position of ``state_dict``, with any number of workers.

        Raises UsageError for the state of another data set or other arguments, and for anything else.
        """
        expected = {**asdict(self.order), "epoch": int, "step": int, "digest": int}
        for name, value in expected.items():
            if name not in state:
                raise UsageError(f"this state is not that of a sampler with global batches: it has no {name}")
            if value is int:
                if isinstance(state[name], bool) or not isinstance(state[name], int) or state[name] < 0:
                    raise UsageError(f"this state is not that of a sampler: {name} is {state[name]!r}")
            elif state[name] != value:
                raise UsageError(
                    f"this state belongs to a sampler whose {name} is {state[name]!r}, but this one has {value!r}: give"
                    " the same data set and the same arguments as before"
                )
        check_epoch(state["epoch"])
        if state["step"] >= self.order.steps:
            raise UsageError(f"this state is at step {state['step']}, but an epoch has {self.order.steps} steps")
        if state["digest"] != self._digest(state["epoch"]):
            raise UsageError(
                "this state comes from another version of NumPy, which shuffles in another order: use that"
            )
        self._place(state["epoch"], state["step"])
        self._start = self.epoch, self.step

    def _digest(self, epoch: int) -> int:
        self._batch(epoch, 0)
        assert self._kept is not None
        return zlib.crc32(self._kept[1].tobytes())


class RepeatedBatches(GlobalBatches):
    """The batches of a log in a process that repeats its steps alone: the parts of a step's workers, one after another.

    ``commit`` counts each part, and the step after its last one.
    """

    def __init__(self, order: SampleOrder, path: str) -> None:
        self._steps, self._name = read_log(path), path
        self.shared: Sequence[Any] = ()
        """The objects that a step changes besides model and optimizer: those of ``syncline.elastic``."""
        super().__init__(order, 0, 1)

    def _place(self, epoch: int, step: int) -> None:
        super()._place(epoch, step)
        self.part = 0
        """The number of the worker whose part comes next."""

    def weigh(self) -> float:
        """The number of samples of the present part."""
        return float(len(share(self._batch(self.epoch, self.step), self.part, len(self.line["members"]))))

    @property
    def line(self) -> Mapping[str, Any]:
        """The log's line of the present step."""
        return self._line(self.epoch, self.step)

    def _line(self, epoch: int, step: int) -> Mapping[str, Any]:
        line = self._steps.get((epoch, step))
        if line is None:
            raise UsageError(f"{self._name} ends before step {step} of epoch {epoch}, or has lost it")
        if line["samples"] != self._batch(epoch, step).tolist():
            raise UsageError(
                f"step {step} of epoch {epoch} had other samples in {self._name}: give the same script, data and NumPy"
            )
        return line

    def __len__(self) -> int:
        lines = [self._steps.get((self.epoch, step)) for step in range(self.order.steps)]
        return sum(1 if line is None else len(line["members"]) for line in lines)

    def _walk(self, walk: object, epoch: int, first: int) -> Iterator[list[int]]:
        skipped = self.part
        for step in range(first, self.order.steps):
            batch, workers = self._batch(epoch, step), len(self._line(epoch, step)["members"])
            if walk is self._walking:
                self._yielded = max(self._yielded, step + 1)
            for worker in range(skipped, workers):
                yield share(batch, worker, workers).tolist()
            skipped = 0
        self._exhausted |= walk is self._walking

    def commit(self, steps: int = 1) -> None:
        """As above, for single steps. Raises NotBuiltError for several at once."""
        if steps != 1:
            raise NotBuiltError("syncline repeat works with a commit() for each batch, without accumulation")
        if self.part + 1 < len(self.line["members"]):
            self.part += 1
            return
        self.part = 0
        super().commit()


def global_batches_of(session: Session, order: SampleOrder) -> GlobalBatches:
    """``sampler_of`` for global batches. Raises UsageError if workers do not exchange in lockstep."""
    if not session.strategy.sync_mode().merges:
        raise UsageError(
            f"sampler(global_batch=): under sync={session.strategy.sync.name} each worker goes at its own pace, so a"
            " step has no global batch; give batch_size=, or use sync=bsp"
        )
    if session.is_worker:
        order.check_alike(session)

    found: GlobalBatches
    if path := os.environ.get(REPEATS):
        if not session.alone or session.global_batches:
            raise NotBuiltError("syncline repeat works in one process, with one sampler")
        found = RepeatedBatches(order, path)
    else:
        check = partial(_check_weights, session, order)
        found = GlobalBatches(order, session.rank, session.world_size, check, _log(session))
    session.global_batches.append(found)
    return found


def go_on(session: Session, samplers: Sequence[GlobalBatches], states: Sequence[Mapping[str, Any]]) -> None:
    """Let these samplers of an earlier session divide their batches from these positions on among the workers of this
    one."""
    for sampler, state in zip(samplers, states, strict=True):
        check = partial(_check_weights, session, sampler.order)
        sampler.divide(state, session.rank, session.world_size, check, _log(session))
        session.global_batches.append(sampler)


def _log(session: Session) -> SampleLog | None:
    """The log of the session's next sampler, if the run keeps one."""
    return _log_of(session, range(session.world_size), session.rank == 0)


def log_of_pushes(session: Session) -> SampleLog | None:
    """The log of the steps that this worker makes by itself, if the run keeps one."""
    return None if session.strategy.sync_mode().merges else _log_of(session, [session.rank], writes=True)


def log_lost_pushes(session: Session, sampler: PoolBatches, lost: Sequence[int], view: int) -> None:
    """Write the steps that ``lost`` workers of an earlier view have made, but could not write themselves.

    All others have written theirs. Worker 0 calls it.
    """
    path = os.environ.get(SAMPLES)
    if path and lost:
        how = {"view": view, "strategy": str(session.strategy), "algorithms": []}
        known = read_log(path) if Path(path).exists() else {}
        sampler.log_rest(known, SampleLog(path, 0, lost, writes=True, how=how))


def _log_of(session: Session, ranks: Sequence[int], writes: bool) -> SampleLog | None:
    path = os.environ.get(SAMPLES)
    if not path or not session.is_worker:
        return None
    members = [session.member.number(rank) for rank in ranks]
    if session.numbers is not None:
        members = [session.numbers[rank] for rank in members]
    table = [] if session.choice is None else list(session.choice.table)
    nodes = [session.group.nodes[rank] for rank in ranks] if session.group.nodes else []
    how = {"view": session.view, "nodes": nodes, "strategy": str(session.strategy), "algorithms": table}
    return SampleLog(path, len(session.global_batches), members, writes, how)


def _check_weights(session: Session, order: SampleOrder) -> None:
    """Raise UsageError if parts of different sizes would count alike."""
    if session.weighs_alike:
        raise UsageError(
            f"a global batch of {order.global_batch} of {order.samples} samples gives {session.world_size} workers"
            " parts of different sizes, but the model counts all workers alike: call syncline.prepare() with"
            " weight='batch' for a loss that is a mean over the batch, with a function for another (PyTorch), or give a"
            " global_batch= that the number of workers divides, and drop_last=True"
        )
