"""Every law of transports can be broken: a transport that does so is caught, by the name of the law."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from summing import Summing
from syncline import registry
from syncline.errors import PeerLost, UsageError
from syncline.testing import BrokenLaw, check_transport, network
from syncline.testing.laws import holds
from syncline.testing.network import Network, Subject, network_of
from syncline.testing.transports import LAWS
from syncline.transports import Bytes, Handle, Transport
from syncline.transports.inproc import Hub

SHORT_S = 0.5


@contextmanager
def summing(world: int) -> Iterator[Sequence[Transport]]:
    hub = Hub(world)
    ends = [Summing(hub, rank) for rank in range(world)]
    yield ends
    for end in ends:
        end.close()


def broken(of: str | Network, **replaced: Any) -> Network:
    """A right transport of whose ends something is replaced."""

    @contextmanager
    def made(world: int) -> Iterator[Sequence[Transport]]:
        with (network_of(of) if isinstance(of, str) else of)(world) as ends:
            for end in ends:
                end.__class__ = type("Broken", (type(end),), replaced)
            yield ends

    return made


def right(end: Any) -> Any:
    """What an end would do."""
    return super(type(end), end)


Send = Callable[..., Handle]


def another(differs: Callable[[int, Bytes], bool]) -> Send:
    """Some messages arrive with another last byte."""

    def send(self: Any, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        if differs(tag, data):
            data = data.copy()
            data[-1] ^= 1
        return right(self).send(dst, tag, data, priority, owner)  # type: ignore[no-any-return]

    return send


def dropping(gone: Callable[[int, float], bool]) -> Send:
    """Some messages never go."""

    def send(self: Any, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        if gone(data.nbytes, priority):
            return Handle("send", dst, tag, data.nbytes, owner)
        return right(self).send(dst, tag, data, priority, owner)  # type: ignore[no-any-return]

    return send


def with_priority(change: Callable[[float, int], float]) -> Send:
    """Messages have another priority than they were given."""

    def send(self: Any, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        return right(self).send(dst, tag, data, change(priority, data.nbytes), owner)  # type: ignore[no-any-return]

    return send


def tags_below(limit: int) -> dict[str, Any]:
    """Tags that are too large are taken for others."""

    def send(self: Any, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        return right(self).send(dst, tag % limit, data, priority, owner)  # type: ignore[no-any-return]

    def recv(self: Any, src: int, tag: int, into: Bytes, owner: Any = None) -> Handle:
        return right(self).recv(src, tag % limit, into, owner)  # type: ignore[no-any-return]

    return {"send": send, "recv": recv}


def told(change: Callable[[Handle], None]) -> Callable[..., list[Handle]]:
    """A poll that says something else of the handles that it returns."""

    def poll(self: Any, timeout: float) -> list[Handle]:
        found: list[Handle] = right(self).poll(timeout)
        for handle in found:
            change(handle)
        return found

    return poll


def forgive(handle: Handle) -> None:
    handle.error = None


def blame_another(handle: Handle) -> None:
    if isinstance(handle.error, PeerLost):
        handle.error = PeerLost("rank 1 is gone", rank=1)


def twice(self: Any, timeout: float) -> list[Handle]:
    return right(self).poll(timeout) * 2  # type: ignore[no-any-return]


def only_at_home(self: Any, timeout: float) -> list[Handle]:
    """Nothing moves but in the thread that made the ends."""
    if threading.current_thread() is not threading.main_thread():
        threading.Event().wait(min(timeout, SHORT_S))
        return []
    return right(self).poll(timeout)  # type: ignore[no-any-return]


def full_at(most: int) -> Send:
    def send(self: Any, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
        if len(self._operations.under_way) >= most:
            raise UsageError(f"{most} messages are under way")
        return right(self).send(dst, tag, data, priority, owner)  # type: ignore[no-any-return]

    return send


def send_to_anybody(self: Any, dst: int, tag: int, data: Bytes, priority: float = 0.0, owner: Any = None) -> Handle:
    with suppress(UsageError):
        return right(self).send(dst, tag, data, priority, owner)  # type: ignore[no-any-return]
    return Handle("send", dst, tag, data.nbytes, owner)


def takes_along(self: Any) -> None:
    """What lies in the inboxes of others goes with the end."""
    if not self._operations.closed:
        for inbox in self._hub.inboxes:
            inbox.queue.clear()
    right(self).close()


def overwrites(self: Any, src: int, tag: int, into: Any, owner: Any = None) -> Handle:
    return right(self).recv(src, tag, into.view(np.uint8), owner)  # type: ignore[no-any-return]


def wake_by_pipe() -> dict[str, Any]:
    """The bell is a pipe, which is written to whenever it was closed."""

    def allocate(self: Any) -> int:
        if "_bell" not in vars(self):
            self._bell = os.pipe()
        return self._bell[1]  # type: ignore[no-any-return]

    def close(self: Any) -> None:
        if not self._operations.closed:
            allocate(self)
            for fd in self._bell:
                os.close(fd)
        right(self).close()

    return {"close": close, "wake": lambda self: os.write(allocate(self), bytes(8))}


left_open: list[int] = []


def leaves_a_file(self: Any) -> None:
    if not self._operations.closed:
        left_open.extend(os.pipe())
    right(self).close()


def in_a_file(self: Any, nbytes: int) -> Bytes:
    """Memory in a file that nobody removes."""
    name = Path(f"/dev/shm/syncline-test-{os.getpid()}")
    name.write_bytes(bytes(nbytes))
    with name.open("r+b") as file:
        self.kept = mmap.mmap(file.fileno(), nbytes)
    return np.frombuffer(self.kept, np.uint8)


def adds_one(self: Any, key: int, array: Any, owner: Any = None) -> Handle:
    array += 1
    return right(self).allreduce(key, array, owner)  # type: ignore[no-any-return]


def in_turn(self: Any, key: int, array: Any, owner: Any = None) -> Handle:  # noqa: ARG001
    self.turn = getattr(self, "turn", 0) + 1
    return right(self).allreduce(self.turn, array, owner)  # type: ignore[no-any-return]


def one_after_another(self: Any, handle: Handle, parts: Sequence[Any]) -> None:
    """Collectives run in the order in which rank 0 starts them, each after those before it."""
    hub, what = vars(self._hub), (handle.kind, handle.tag)
    order, come = hub.setdefault("order", []), hub.setdefault("come", {})
    with hub.setdefault("turns", threading.Lock()):
        if self.rank == 0:
            order.append(what)
        come.setdefault(what, []).append((self, handle, parts))
        while order and len(come.get(order[0], ())) == self.world:
            for end, its, its_parts in come.pop(order.pop(0)):
                right(end)._come(its, its_parts)


def gathers_too_few(self: Any, key: int, parts: Sequence[Any], owner: Any = None) -> Handle:
    return right(self).all_gather(key, parts[:-1], owner)  # type: ignore[no-any-return]


def adds_anything(self: Any, key: int, array: Any, owner: Any = None) -> Handle:
    return right(self).allreduce(key, array.view(np.float64), owner)  # type: ignore[no-any-return]


BROKEN: dict[str, list[Network]] = {
    "a message arrives unchanged": [
        broken("inproc", send=another(lambda _, data: data.nbytes == 4097)),
        broken("inproc", allocate=lambda _, nbytes: np.ones(nbytes, np.uint8)),
        broken("inproc", poll=twice),
    ],
    "a borrowed message is readable until released": [
        broken("inproc", lends_from=lambda _, src: False),  # noqa: ARG005
        broken("tcp", lends_from=lambda _, src: True),  # noqa: ARG005
        broken("inproc", release=lambda _, handle: None),  # noqa: ARG005
    ],
    "receives may come in any order of tags": [broken("inproc", **tags_below(4))],
    "tags are numbers of 64 bits": [broken("inproc", **tags_below(2**32))],
    "one tag keeps its order whatever the sizes": [
        broken("inproc", send=with_priority(lambda _, nbytes: nbytes)),
    ],
    "many exchanges are in flight between all pairs": [broken("inproc", send=another(lambda tag, _: tag == 7))],
    "ends move in threads of their own": [broken("inproc", poll=only_at_home)],
    "any number of messages may wait": [broken("inproc", send=full_at(2000))],
    "both send large messages before either receives": [
        broken("inproc", send=dropping(lambda nbytes, _: nbytes > 10_000_000)),
    ],
    "a message that does not fit is an error and harms no other": [broken("inproc", poll=told(forgive))],
    "unknown peers are refused": [broken("inproc", send=send_to_anybody)],
    "traffic counts every byte of a message": [
        broken("inproc", traffic=lambda self: ({1 - self.rank: 99_999}, {1 - self.rank: 99_999})),
        broken("inproc", traffic=lambda _: ({0: 100_000}, {0: 100_000})),
        broken("inproc", moved_bytes=99_999),
    ],
    "freed memory is not confused with new memory": [
        broken("inproc", send=another(lambda _, data: data.nbytes == 1 << 21)),
    ],
    "received data is added": [broken("tcp", add=overwrites)],
    "an urgent message overtakes waiting messages": [
        broken("inproc", send=with_priority(lambda *_: 0.0)),
        broken("inproc", send=with_priority(lambda priority, _: -priority)),
    ],
    "unreceived messages hold up nothing": [broken("inproc", send=dropping(lambda _, priority: priority < 0))],
    "one tag keeps its order among urgent messages": [broken("inproc", send=with_priority(lambda _, nbytes: nbytes))],
    "waiting messages are still sent at the end": [broken("inproc", close=takes_along)],
    "poll returns after its time limit": [broken("inproc", poll=lambda self, _: right(self).poll(4 * SHORT_S))],
    "wake ends a poll from another thread": [
        broken("inproc", wake=lambda self: None, poll=lambda self, _: right(self).poll(4 * SHORT_S))  # noqa: ARG005
    ],
    "the end of a peer fails only operations that wait for it": [
        broken("inproc", poll=told(blame_another)),
        broken("inproc", poll=told(forgive)),
    ],
    "messages for an ended peer delay no end": [
        broken("inproc", idle=property(lambda _: False)),
    ],
    "messages sent before the end still arrive": [
        broken("inproc", poll=lambda *_: [], close=takes_along),
    ],
    "the last acknowledgements are written before the end": [broken("inproc", close=takes_along)],
    "a closed transport refuses work": [broken("inproc", poll=lambda *_: [])],
    "a wake after the end touches no file": [broken("inproc", **wake_by_pipe())],
    "nothing is left behind": [
        broken("inproc", close=leaves_a_file),
        broken("inproc", allocate=in_a_file),
    ],
    "its allreduce adds every type": [broken(summing, allreduce=adds_one)],
    "its halves add and gather every type": [broken(summing, all_gather=gathers_too_few)],
    "a half that all ranks have reached waits for no other": [broken(summing, _come=one_after_another)],
    "allreduces match by key whatever the order of ranks": [broken(summing, allreduce=in_turn)],
    "messages and allreduces share the transport": [broken(summing, send=another(lambda *_: True))],
    "unsupported types of sums are refused": [broken(summing, allreduce=adds_anything)],
    "an allreduce that a peer leaves out fails": [broken(summing)],
}


@pytest.fixture
def _short(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nobody waits long for what does not come; what was left open is closed."""
    monkeypatch.setattr(network, "LIMIT_S", SHORT_S)
    yield
    while left_open:
        os.close(left_open.pop())
    Path(f"/dev/shm/syncline-test-{os.getpid()}").unlink(missing_ok=True)


@pytest.mark.every(2)
@pytest.mark.usefixtures("_short")
@pytest.mark.parametrize("law", list(LAWS), ids=lambda law: law.name)
def test_a_broken_transport_is_caught_by_the_law(law: Any) -> None:
    for made in BROKEN[law.name]:
        with pytest.raises(BrokenLaw) as caught:
            holds(law, Subject(made, 0, ("float32",)), "transport broken", 0, 10)
        assert str(caught.value).startswith(f"transport broken breaks the law {law.name!r} with ")


def test_a_transport_that_reaches_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.names("transports")
    monkeypatch.setitem(registry._entries, "transports", dict(registry._entries["transports"]))
    registry.register("transports", "loose", connection="string")(lambda *_: None)
    with pytest.raises(BrokenLaw, match=r"connection='string': it must be 'tcp', 'unix' or 'own'"):
        check_transport("loose")


def test_a_transport_without_urgency_is_not_held_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.get("transports", "inproc")
    monkeypatch.setitem(registry._entries, "transports", dict(registry._entries["transports"]))
    registry.register("transports", "plain", priority=False, **entry.capabilities)(type("Plain", (entry.target,), {}))
    assert "an urgent message overtakes waiting messages" not in check_transport("plain", examples=1)
