"""What a store of torch's is used for: to tell where the processes meet, and a key that guards against accidents.

It is torchrun's own (TCPStore), served by its agent to whoever reaches it, or the one that a process group was given.
It cannot prove who wrote a value and its calls do not always keep a time limit: one that does not answer holds its
caller
for ever. So they are made in a thread that is given up on. Loads torch, which torchrun, or the group, has brought.
"""

from __future__ import annotations

import datetime
import json
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from ..errors import GroupError
from .environment import Environment

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store, TCPStore

_VALUE_BYTES = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Told:
    """Where rank 0 serves the meeting; ``key`` is empty where the run has a secret."""

    address: str
    port: int
    key: bytes = b""


def tell(environment: Environment, run: str, told: Told, limit_s: float) -> None:
    """Rank 0 writes where the processes of ``run`` meet; raises GroupError when the store does not take it."""
    value = json.dumps([told.address, told.port, told.key.hex()])
    _with_store(environment, limit_s, lambda store: store.set(_key(run), value))


def hear(environment: Environment, run: str, limit_s: float) -> Told:
    """Where the processes of ``run`` meet; raises GroupError when rank 0 has not told within ``limit_s``."""
    within = datetime.timedelta(seconds=limit_s)

    def read(store: Store) -> bytes:
        store.wait([_key(run)], within)  # another thread may use the same connection, which a get would keep
        return store.get(_key(run))

    value = bytes(_with_store(environment, limit_s, read))
    try:
        if len(value) > _VALUE_BYTES:
            raise ValueError
        address, port, key = json.loads(value)
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError
        return Told(str(address), port, bytes.fromhex(key))
    except (ValueError, TypeError) as error:
        raise GroupError(
            f"what {environment.store_name} says of the place to meet is not of this version: does another program, or"
            " another version, use the same store?"
        ) from error


def _key(run: str) -> str:
    return f"syncline/{run}/meeting"


def _with_store(environment: Environment, limit_s: float, call: Callable[[Store], T]) -> T:
    """The result of a call, which another thread makes: after ``limit_s`` nobody waits for it any more."""
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(call(environment.store or _connect(environment, limit_s)))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=work, name="syncline-agent-store", daemon=True).start()
    where = f", at {environment.address}:{environment.port}," if environment.address else ""
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        answer = TimeoutError("no answer")
    if not isinstance(answer, Exception):
        return answer
    name = environment.store_name
    place = "there" if environment.store is None else f"in {name}"
    what = f"told {name} where to meet" if environment.rank == 0 else f"heard {place} where rank 0 is"
    running = "is torchrun running there, and " if environment.store is None else ""
    raise GroupError(
        f"rank {environment.rank} has not {what}{where} within {limit_s:.0f} s:"
        f" {str(answer).splitlines()[0] if str(answer) else type(answer).__name__}; {running}has rank 0 come this far?"
        " see what it printed"
    ) from answer


def _connect(environment: Environment, limit_s: float) -> TCPStore:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore(
        environment.address,
        environment.port,
        is_master=False,
        timeout=datetime.timedelta(seconds=limit_s),
        wait_for_workers=False,
    )
