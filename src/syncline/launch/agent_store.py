"""What torchrun's own store is used for: to tell where the processes meet, and a key that guards against accidents.

The store is torch's (TCPStore), served by torchrun's agent to whoever reaches it. It cannot prove who wrote a value and
its calls do not always keep a time limit: one that does not answer holds its caller for ever. So they are made in a
thread that is given up on. Loads torch, which torchrun has brought.
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
    from torch._C._distributed_c10d import TCPStore

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
    value = bytes(_with_store(environment, limit_s, lambda store: store.get(_key(run))))
    try:
        if len(value) > _VALUE_BYTES:
            raise ValueError
        address, port, key = json.loads(value)
        if type(port) is not int or not 0 < port < 1 << 16:
            raise ValueError
        return Told(str(address), port, bytes.fromhex(key))
    except (ValueError, TypeError) as error:
        raise GroupError(
            "what torchrun's store says of the place to meet is not of this version: does another program, or another"
            " version, use the same store?"
        ) from error


def _key(run: str) -> str:
    return f"syncline/{run}/meeting"


def _with_store(environment: Environment, limit_s: float, call: Callable[[TCPStore], T]) -> T:
    """The result of a call, which another thread makes: after ``limit_s`` nobody waits for it any more."""
    answers: queue.SimpleQueue[T | Exception] = queue.SimpleQueue()

    def work() -> None:
        try:
            answers.put(call(_connect(environment, limit_s)))
        except Exception as error:
            answers.put(error)

    threading.Thread(target=work, name="syncline-agent-store", daemon=True).start()
    where = f"{environment.address}:{environment.port}"
    try:
        answer = answers.get(timeout=limit_s)
    except queue.Empty:
        answer = TimeoutError("no answer")
    if not isinstance(answer, Exception):
        return answer
    what = "told torchrun's store where to meet" if environment.rank == 0 else "heard there where rank 0 is"
    raise GroupError(
        f"rank {environment.rank} has not {what}, at {where}, within {limit_s:.0f} s:"
        f" {str(answer).splitlines()[0] if str(answer) else type(answer).__name__}; is torchrun running there, and has"
        " rank 0 come this far? see what it printed"
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
