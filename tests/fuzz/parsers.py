"""The registry of everything that reads bytes or text of others: valid inputs, the parser, and the errors it promises.

A new parser is one function here, decorated with ``parser``: it yields valid inputs once and returns the function that
parses one. Whatever the input, that function returns or raises one of the named errors.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gzip
import hashlib
import json
import mmap
import os
import re
import socket
import ssl
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
from attacks import LARGE, attacked
from mutations import MOST_BYTES
from planted import Planted, causes
from plays import member
from test_tls import write
from test_transport_faults import Scripted, frame

from frames import header
from syncline import membership, metrics, registry, saving
from syncline.codecs import Codec, Merges, PayloadError
from syncline.compression import saved
from syncline.engine.flight import BYTES, Flight
from syncline.engine.trace import begin
from syncline.errors import (
    DataError,
    GroupError,
    HandshakeError,
    MismatchError,
    NotBuiltError,
    ProtocolError,
    RollCallError,
    StrategyError,
    SynclineError,
    UsageError,
)
from syncline.global_batches import RepeatedBatches
from syncline.kernels import rows
from syncline.launch import address, environment, relay, rendezvous
from syncline.launch.environment import Environment
from syncline.launch.joining import TOLD, Frames, Guest, Reception, in_frame
from syncline.launch.relay import Name, Relay
from syncline.membership import Accept, Accepted, Commit, Join, Outbid, Peer, Prepare, Promise, Refused, Report, View
from syncline.nouns import Bucket, Layer, Rate, Seconds, Size, Slice, Spec
from syncline.recovery import agreement
from syncline.sampling import Pool, Pools, SampleOrder
from syncline.serving import records, turns
from syncline.serving.messages import read_message
from syncline.session import layout, tickets
from syncline.session.layout import Layout
from syncline.strategy.choice import Choice
from syncline.strategy.grammar import read_part, read_value
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import build
from syncline.timeline import chrome, flight, flight_memory, spans
from syncline.timeline.folder import write_all
from syncline.torch_backend import mailbox
from syncline.transports import zmq
from syncline.transports._frames import HEADER_BYTES
from syncline.transports.tcp import Tcp
from syncline.wire import culprit, handshake, reports, watch
from syncline.wire.checksums import Checksums
from syncline.wire.meeting import (
    AMOUNT,
    HEARD,
    Broken,
    Kind,
    Meeting,
    Roll,
    fault_frame,
    note,
    read_member,
    read_roll,
    told,
)
from syncline.wire.meeting import (
    Frames as MeetingFrames,
)
from syncline.wire.meeting import frame as meeting_frame
from syncline.wire.tls import FILES, Credentials, credentials
from syncline_bench import messages, top
from syncline_bench.doctor.checks import Finding, Way
from syncline_bench.doctor.hosts import Links, Offset, Seen, judged, read_reached
from syncline_bench.explain.flights import explain_flight
from syncline_bench.explain.reading import read_timeline
from syncline_bench.explain.results import explain_result
from syncline_bench.predict.networks import inline, load_network, parse_holdout, parse_network, to_json
from syncline_bench.report.accuracy import AccuracyResult
from syncline_bench.report.bench import BenchResult, CodecResult, GradientResult, Measured, StepResult
from syncline_bench.report.comparison import Result, Row
from syncline_bench.report.predictions import CollectivePrediction, Prediction
from syncline_bench.report.tuning import Tried, Tuned
from syncline_bench.workloads import cifar10
from syncline_bench.workloads._trace import read_trace

Parse = Callable[[bytes], object]


class Parser(NamedTuple):
    """A parser: valid inputs and the function, the errors that it promises, and its share of all inputs."""

    name: str
    make: Callable[[], tuple[list[bytes], Parse]]
    errors: tuple[type[Exception], ...]
    weight: float


PARSERS: list[Parser] = []


def parser(
    *errors: type[Exception], weight: float = 1.0
) -> Callable[[Callable[[], tuple[list[bytes], Parse]]], Callable[[], tuple[list[bytes], Parse]]]:
    def enter(make: Callable[[], tuple[list[bytes], Parse]]) -> Callable[[], tuple[list[bytes], Parse]]:
        PARSERS.append(Parser(make.__name__, make, errors, weight))
        return make

    return enter


def text(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


def plain(value: Any) -> bytes:
    return json.dumps(value).encode()


# Texts of users.


@parser(UsageError, weight=2)
def strategies() -> tuple[list[bytes], Parse]:
    valid = [
        b"ring", b"hierarchical(inside=ring) schedule=wait_free", b"ps(servers=2, on=workers) sync=ssp(staleness=3)",
        b"direct codec=feedback(topk(ratio=0.01), warmup=2) transport=tcp(rate=1Gbit, delay=5ms)",
        b"ring sync=local(steps=2) codec=int8 schedule=fixed(bucket=4MiB)", b"auto codec=auto schedule=auto",
    ]  # fmt: skip
    return valid, lambda data: str(Strategy.parse(text(data)))


@parser(StrategyError)
def values() -> tuple[list[bytes], Parse]:
    kinds = (Rate, Seconds, Size, int, float, bool, int | None)
    valid = [b"1Gbit", b"1.5ms", b"64KiB", b"17", b"0.25", b"true", b"none", b"1e3us"]

    def parse(data: bytes) -> None:
        for kind in kinds:
            with contextlib.suppress(StrategyError):
                read_value(text(data), kind, "a value")

    return valid, parse


@parser(UsageError)
def constants() -> tuple[list[bytes], Parse]:
    valid = [
        b"alpha=45us,beta=1.2ns,gamma=2.5ns", b"L=5us,o=2us,g=3us,G=1ns",
        b"alpha=45us,beta=1ns,topology=switch,cores=3",
        b"alpha=5us,rate=10Gbit,inside.alpha=2us,inside.beta=1ns",
    ]  # fmt: skip
    return valid, lambda data: inline(text(data))


@parser(UsageError)
def launchers() -> tuple[list[bytes], Parse]:
    """The variables that launchers set, as lines."""
    valid = [
        b"SYNCLINE_PROCESS=1\nSYNCLINE_PROCESSES=3\nRANK=1\nWORLD_SIZE=2\nMASTER_ADDR=h\nMASTER_PORT=29500\nSYNCLINE_SERVERS=1",
        b"SLURM_PROCID=1\nSLURM_STEP_NUM_TASKS=4\nSLURM_LOCALID=0\nSLURM_STEP_TASKS_PER_NODE=2(x2)\nSLURM_NODEID=1\n"
        b"SLURM_STEP_NODELIST=gpu[1-3,07],login\nSLURM_JOB_ID=7",
        b"OMPI_COMM_WORLD_RANK=0\nOMPI_COMM_WORLD_SIZE=2\nOMPI_COMM_WORLD_LOCAL_RANK=0\nOMPI_COMM_WORLD_LOCAL_SIZE=2",
    ]  # fmt: skip

    def parse(data: bytes) -> None:
        lines = [line.partition("=") for line in text(data).split("\n")]
        environment.recognise({name: value for name, _, value in lines})

    return valid, parse


@parser(UsageError, weight=0.2)
def words_of_tls() -> tuple[list[bytes], Parse]:
    """What ``tls=`` may be: off, on, or a folder."""
    folder = write(Path(_scratch().name) / "tls")
    return [b"off", b"on", folder.encode()], lambda data: credentials(text(data), b"a secret", b"a run", 0)


@parser(UsageError, weight=0.2)
def certificates() -> tuple[list[bytes], Parse]:
    """The three files of a folder, one after the other."""
    folder = Path(write(Path(_scratch().name) / "certificates"))
    files = [folder / name for name in FILES]
    mark = b"\n\n"

    def parse(data: bytes) -> None:
        for path, part in zip(files, data.split(mark), strict=False):
            path.write_bytes(part)
        Credentials(str(folder), b"", b"", 0)

    return [mark.join(path.read_bytes() for path in files)], parse


@parser(UsageError)
def variables_of_runs() -> tuple[list[bytes], Parse]:
    """What launchers and users set for the parts of a run, one variable a line."""
    names = relay.VARIABLE, reports.VARIABLE, flight_memory.MEMORY, flight_memory.PROCESS, metrics.VARIABLE
    valid = [b"3:0:2:1:4\n3:0\n4\n1\n9400", b"2:4", b"3:2:2:1:0\n3:1\n4\n0\nlocalhost:9400,error=50"]

    def parse(data: bytes) -> None:
        values = [line.replace("\0", "") for line in text(data).split("\n")]
        with mock.patch.dict(os.environ, dict(zip(names, values, strict=False))):
            relay.joins()
            relay.range_asked(None)
            reports._inherited()
            flight_memory._inherited()
            flight_memory.forget_records(0)
            metrics.serving_of(os.environ)

    return valid, parse


# What strangers and peers say while a group forms.


@parser(HandshakeError)
def hellos() -> tuple[list[bytes], Parse]:
    run, secret = handshake.run_id("a run"), b"a secret"
    said = handshake.hello(run, 1, 0, "data")
    reply = handshake.answer(secret, said)

    def parse(data: bytes) -> None:
        if len(data) >= handshake.HELLO_BYTES:
            heard = handshake.read_hello(data[: handshake.HELLO_BYTES])
            handshake.check_proof(secret, heard, reply, data[handshake.HELLO_BYTES :])
        else:
            handshake.check_answer(secret, said, data)

    return [said.raw, said.raw + handshake.check_answer(secret, said, reply), reply], parse


def _meeting(frames: list[tuple[Kind, bytes]]) -> bytes:
    return b"".join(meeting_frame(*one) for one in frames)


@parser(weight=2)
def meetings() -> tuple[list[bytes], Parse]:
    """Rank 1's frames to the meeting of two processes, to which rank 0 has come: a breach ends it for all."""
    record = member(1, 2).to_text().encode()
    key = note("syncline/a", b"value")
    valid = [
        _meeting([(Kind.RECORD, record), (Kind.SET, key), (Kind.GET, note("syncline/a")), (Kind.THROUGH, b"")]),
        _meeting([(Kind.RECORD, record), (Kind.ADD, note("n", AMOUNT.pack(3))), (Kind.LATE, b"30")]),
        _meeting([(Kind.RECORD, record)]) + fault_frame("no such interface"),
    ]

    def parse(data: bytes) -> None:
        meeting = Meeting(2, b"key")
        meeting.enter(0, 0, "here")
        meeting.hear(0, Kind.RECORD, member(0, 2).to_text().encode())
        meeting.enter(1, 1, "there")
        frames = MeetingFrames(HEARD)
        frames.feed(data)
        try:
            while (found := frames.take()) is not None:
                meeting.hear(1, *found)
        except Broken as broken:
            meeting.break_off(1, str(broken))
        meeting.leave(1)

    return valid, parse


@parser(Broken, RollCallError)
def rolls() -> tuple[list[bytes], Parse]:
    """What the meeting tells, and the records in it."""
    roll = b"[%s]" % b",".join(member(rank, 2).to_text().encode() for rank in range(2))
    valid = [
        roll,
        member(0, 2).to_text().encode(),
        _meeting([(Kind.WELCOME, b"key"), (Kind.ROLL, roll), (Kind.OVER, b"")]),
    ]

    def parse(data: bytes) -> None:
        if data[:1] == b"[":
            read_roll(data, 2)
        elif data[:1] == b"{":
            read_member(data)
        else:
            frames = MeetingFrames(told(2))
            frames.feed(data)
            while (found := frames.take()) is not None:
                if found[0] is Kind.ROLL:
                    read_roll(found[1], 2)

    return valid, parse


@parser(GroupError, weight=0.5)
def words_of_stores() -> tuple[list[bytes], Parse]:
    """The address of rank 0 in a store of torch, to which anybody may write."""
    valid = [plain(["10.0.0.1", 29500, "00ff"]), plain(["fe80::1%eth0", 1, ""]), plain(["gpu-1.example.org", 9, "00"])]

    def parse(data: bytes) -> None:
        store = SimpleNamespace(wait=lambda *_: None, get=lambda _: data)
        at = rendezvous.look_up(Environment("torchrun", 1, 2, store=store), "run", 5.0)
        assert re.fullmatch(r"[^\s/]+", at.address)
        assert 0 < at.port < 1 << 16

    return valid, parse


@parser(GroupError)
def words_over_mpi() -> tuple[list[bytes], Parse]:
    """The address of rank 0, as it tells all processes that mpirun has started."""
    here = Environment("mpirun", 1, 2, address="")
    valid = [plain({"address": "10.0.0.1", "port": 29500, "run": "00ff", "secret": "ff00"})]
    return valid, lambda data: address._told(here, data)


@parser(OSError, HandshakeError, weight=0.5)
def handshakes_of_tls() -> tuple[list[bytes], Parse]:
    """What a process that calls, or that is called, says in place of TLS's handshake; the first byte chooses."""
    sides = [Credentials("on", b"a secret", b"a run", rank) for rank in range(2)]
    ends = socket.socketpair()
    said = []
    with ends[0], ends[1]:
        calling, called = sides[1].wrap(ends[0], listening=False), ends[1]
        calling.setblocking(False)
        with contextlib.suppress(ssl.SSLWantReadError):
            calling.do_handshake()
        said.append(b"\1" + called.recv(MOST_BYTES))
        calling.close()
    valid = [*said, b"\0" + said[0][1:]]

    def parse(data: bytes) -> None:
        listening = data[:1] == b"\1"
        here, there = socket.socketpair()
        with here, there:
            there.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                there.send(data[1:])
            made = sides[not listening]
            with made.wrap(here, listening=listening) as sealed:
                sealed.setblocking(False)
                with contextlib.suppress(ssl.SSLWantReadError):
                    sealed.do_handshake()
                    made.check(sealed, 1)

    return valid, parse


@parser(ProtocolError)
def notes_of_zmq() -> tuple[list[bytes], Parse]:
    return [plain({"at": {"1": "tcp://10.0.0.1:5"}, "token": "t", "key": "k"})], lambda data: zmq._Note.read(1, data)


# What members of a group say to each other.


@parser(ValueError)
def culprits() -> tuple[list[bytes], Parse]:
    valid = [culprit.pack(culprit.Answer({1: "bucket 3", 2: "a send"}, 7, 3)), culprit.pack(culprit.Answer({}))]

    def parse(data: bytes) -> None:
        heard = culprit.unpack(data, 9)
        assert all(peer < 9 and label.isprintable() for peer, label in heard.waits.items())

    return valid, parse


class _Wire:
    """A control connection that has bytes to read and takes all."""

    family = socket.AF_UNIX

    def __init__(self) -> None:
        self.data = b""
        self._pair = socket.socketpair()

    def recv(self, _: int) -> bytes:
        return self.data

    def send(self, data: bytes, _: int) -> int:
        return len(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pair[0], name)

    def close(self) -> None:
        for end in self._pair:
            end.close()


class _Watcher(watch.Watcher):
    """One that raises the fault of a peer, in place of ending the run."""

    def _fail(self, culprit: int, reason: str) -> None:
        raise ValueError(f"{culprit} {reason}")


@parser(ValueError, weight=2)
def control_messages() -> tuple[list[bytes], Parse]:
    pack = watch._FRAME.pack
    numbered = culprit.pack(culprit.Answer({0: "bucket 3"}))
    valid = [
        pack(1, 0) * 3 + pack(2, 0), pack(3, 4 + 6) + b"\1\0\0\0failed", pack(4, 4) + b"\1\0\0\0",
        pack(5, 4 + len(numbered)) + b"\1\0\0\0" + numbered,
    ]  # fmt: skip
    wire = _Wire()
    watcher = _Watcher(
        Roll(0, (member(0, 2), member(1, 2)), "run", b""), {1: wire}, lambda _: None, lambda _: None  # type: ignore[dict-item]
    )  # fmt: skip

    def parse(data: bytes) -> None:
        wire.data = data or b"\1"
        watcher.left.clear()
        watcher._partial[1] = b""
        watcher._asked, watcher._asked_by = {1: 1}, {1: 0}
        watcher._answers[1] = 0, None
        watcher._read(1)
        assert len(watcher._partial[1]) <= len(data) + 1

    weakref.finalize(parse, wire.close)
    weakref.finalize(parse, watcher.close_descriptors)
    return valid, parse


@parser(SynclineError)  # also where there is no memory for a body that is announced
def frames_of_libraries() -> tuple[list[bytes], Parse]:
    valid = [
        frame(1, 0, 0, 4, b"abcd") + frame(2, 1, 1, LARGE), frame(6, 3, 1, LARGE) + frame(7, 3, 1, 0),
        frame(3, 1, 3, 0) + frame(5, 0, 2, 0), frame(4, 0, 5, 0) + frame(8, 0, 5, 0),
    ]  # fmt: skip

    def parse(data: bytes) -> None:
        end = Scripted()
        handles = [end.recv(0, tag, np.zeros(LARGE if tag else 100, np.uint8)) for tag in range(2)]
        handles += [end.borrow(0, 2, 8), end.send(0, 3, np.zeros(LARGE, np.uint8))]
        at = 0
        while at < len(data):
            size = HEADER_BYTES + 4 * (data[at] == 1)
            end.frames.append((0, data[at : at + size]))
            at += size
        try:
            end.poll(0.0)
        finally:
            assert all(handle.error is None or isinstance(handle.error, SynclineError) for handle in handles)

    return valid, parse


def _streams(kind: str) -> Callable[[], tuple[list[bytes], Parse]]:
    def make() -> tuple[list[bytes], Parse]:
        valid = [
            header(1, 5, 0, 0) + b"abcde" + header(2, 0, 1, 0), header(1, LARGE, 1, 0) + bytes(3000),
            header(2, 24, 0, 1) + bytes(24), header(6, 0, 0, 1) + header(3, 0, 0, 1), header(1, 8, 4, 0) + bytes(8),
        ]  # fmt: skip
        if kind == "checked":
            sums = Checksums(1, 0, np.zeros(rows.WORDS, np.int64))
            first, start = sums.seal(memoryview(header(1, 5, 0, 0)))
            whole = bytes(first) + b"abcde" + bytes(sums.of_body(memoryview(b"abcde"), start))
            valid = [whole + bytes(sums.seal(memoryview(header(2, 0, 1, 0)))[0])]

        def parse(data: bytes) -> None:
            with attacked(kind) as (end, raw):
                end.recv(1, 0, np.zeros(10, np.uint8))
                end.recv(1, 1, np.zeros(2 * LARGE, np.uint8))
                end.send(1, 3, np.zeros(2 * LARGE, np.uint8))
                with contextlib.suppress(OSError):
                    raw.send(data or b"\0")
                end.poll(0.0)
                end.poll(0.0)

        return valid, parse

    make.__name__ = f"streams_of_{kind}"
    return make


for _kind in ("tcp", "shaped", "checked", "shm"):
    parser(ProtocolError, weight=0.3)(_streams(_kind))


@parser(SynclineError, weight=0.1)
def streams_under_tls() -> tuple[list[bytes], Parse]:
    """Of a peer of the run, or, if the first byte is 1, of somebody who has taken over its wire."""
    sides = [Credentials("on", b"a secret", b"a run", rank) for rank in range(2)]
    valid = [b"\0" + header(1, 5, 0, 0) + b"abcde" + header(2, 0, 1, 0), b"\1\x17\x03\x03\0\x20" + bytes(32)]

    def parse(data: bytes) -> None:
        with contextlib.ExitStack() as stack:
            ends = [stack.enter_context(end) for end in socket.socketpair()]
            mine, theirs = (stack.enter_context(sides[i].wrap(ends[i], listening=i == 0)) for i in range(2))
            for end in 2 * (theirs, mine):
                end.setblocking(False)
                with contextlib.suppress(ssl.SSLWantReadError):
                    end.do_handshake()
            here = Tcp(0, {1: mine})
            stack.callback(here.close)
            here.recv(1, 0, np.zeros(10, np.uint8))
            with contextlib.suppress(OSError):
                send = partial(socket.socket.send, theirs) if data[:1] == b"\1" else theirs.send
                send(data[1:] or b"\0")
            here.poll(0.0)
            here.poll(0.0)

    return valid, parse


@parser(MismatchError)
def tickets_of_ranks() -> tuple[list[bytes], Parse]:
    """The rows of the table that workers exchange at each call."""
    mine = tickets.Ticket(tickets.ALLREDUCE, 3, 17, 1.0, tickets.sized(5, "float32"))
    step = tickets.Ticket(tickets.STEP, 4, tickets.step_argument(3, 9), 2.0, 0)
    valid = [tickets.ticket_table(3, rank, one).tobytes() for one in (mine, step) for rank in range(3)]
    valid += [tickets.ticket_table(1, 0, one).tobytes() * 3 for one in (mine, step)]

    def parse(data: bytes) -> None:
        size = 3 * tickets.TICKET_BYTES
        table = np.frombuffer(data[:size].ljust(size, b"\0"), np.uint8).reshape(3, -1)
        own = step if data[:1] == bytes([tickets.STEP]) else mine
        meeting = tickets.Meeting(
            None, table, own, lambda _, theirs: MismatchError(f"{theirs.text} {tickets.remedy(theirs, own)}")
        )
        meeting.tickets()
        meeting.share()

    return valid, parse


@parser(ProtocolError)
def mail() -> tuple[list[bytes], Parse]:
    """Messages with tags between two ranks, as torch.distributed sends them: the header, and small data with it."""
    pack = mailbox._HEADER.pack
    valid = [pack(7, 5, 1) + b"abcde", pack(0, 1 << 20, 1), pack(-1, 0, 1)]
    us: Any = SimpleNamespace(name=lambda rank: f"rank {rank}", ranks=[0, 1], process=SimpleNamespace(fail=lambda e: e))

    def parse(data: bytes) -> None:
        found = mailbox.Mailbox(us)._opened(1, SimpleNamespace(result=data, label="receive"))  # type: ignore[arg-type]
        assert found.nbytes >= len(found.body)

    return valid, parse


_SESSION: Any = SimpleNamespace(
    name=lambda index: f"rank {index}",
    roll=SimpleNamespace(members=[member(0, 2), member(1, 2)]),
    member=SimpleNamespace(number=int),
    strategy=Strategy.parse("ring"),
)


@parser(ProtocolError)
def messages_of_owners() -> tuple[list[bytes], Parse]:
    fields = {"kind": str, "clock": int, "values": dict, "waited_s": float, "last": bool}
    valid = [plain({"kind": "push", "clock": 3, "values": {"lr": 0.1}, "waited_s": 0.5, "last": False})]
    return valid, lambda data: read_message(_SESSION, 1, "a request", data, fields)


@parser(ProtocolError)
def requests_of_samplers() -> tuple[list[bytes], Parse]:
    """What a worker asks of the process that keeps the pool of samples."""
    valid = [plain({"kind": "take", "sampler": 0, "epoch": 3}), plain({"kind": "leave"})]

    def parse(data: bytes) -> None:
        nothing: Any = lambda *_, **__: SimpleNamespace(label="", result=data)  # noqa: E731
        engine = SimpleNamespace(promise=nothing, fulfil=nothing, then=nothing)
        process = SimpleNamespace(before_end=[])
        names = {"called": str, "recv": nothing, "send": nothing, "engine": engine, "process": process}
        session: Any = SimpleNamespace(**vars(_SESSION), **names, world_size=3, rank=0, alone=False)
        pools = Pools(session)
        pools._kept.append(Pool(100, 7, 3))
        pools._take(1, nothing())

    return valid, parse


@parser(ProtocolError)
def records_of_owners() -> tuple[list[bytes], Parse]:
    some = records.Elements.of(np.arange(6, dtype=np.float32))
    whole = [records.Record(Slice(0, 0, 6), "exp_avg", some), records.Record(Slice(1, 2, 5), "step", 3)]
    packed = records.pack(whole)
    table = packed[8 : 8 + int.from_bytes(packed[:8], "little")]

    def parse(data: bytes) -> None:
        if data[:1] == b"[":  # with a length that is right
            data = len(data).to_bytes(8, "little") + data + bytes(24)
        assert all(one.slice.start <= one.slice.stop for one in records.unpack(data, "rank 1", 1))

    return [packed, table], parse


@parser(ValueError)
def samples_in_the_weights() -> tuple[list[bytes], Parse]:
    account = turns.Account([(0, 0, 40), (1, 0, 8), (1, 12, 16)])

    def parse(data: bytes) -> None:
        with contextlib.suppress(RecursionError):
            told = json.loads(data.decode())
            assert turns.Account(turns.counted_in(told)).first_left(0, 40) >= 0

    return [json.dumps(account.counted).encode()], parse


@parser(ProtocolError, UsageError)
def layouts() -> tuple[list[bytes], Parse]:
    """What rank 0 tells about the buckets."""
    layers = [Layer(Spec("a", (4, 5)), 0.1, 0.2), Layer(Spec("b", (7,)))]
    buckets = (Bucket((Slice(1, 0, 7),), "float32"), Bucket((Slice(0, 0, 20),), "float32"))
    valid = plain(Layout(tuple(layers), buckets, (0.0, 1.0)).plain() | {"passed": [3, 4, False]})
    return [valid], lambda data: layout._said(_SESSION, layers, data)


@parser(ValueError)
def arrays_of_codecs() -> tuple[list[bytes], Parse]:
    state = {"own/0/residual": np.arange(7.0), "clock": np.array([3]), "again/1/4": np.ones((2, 3), "f2", "F")}
    return [saved.as_bytes(state)], saved.from_bytes


@parser(ValueError)
def states_of_elastic_runs() -> tuple[list[bytes], Parse]:
    state = {"model": {"w": np.ones((2, 3), np.float32), "n": 3}, "steps": [1, (2.5, None)], "scalar": np.float64(2)}
    return [saving.packed(state)], saving.unpacked


@parser(UsageError)
def tables_of_algorithms() -> tuple[list[bytes], Parse]:
    def parse(data: bytes) -> None:
        with contextlib.suppress(ValueError, RecursionError):
            table = json.loads(data)
            Choice.read(table).at(5000)

    return [plain([[0, "tree"], [65536, "ring"]])], parse


# Elastic runs.


def _peers(count: int) -> tuple[Peer, ...]:
    return tuple(Peer(number, str(number)) for number in range(count))


_VIEW = View(1, _peers(3), 3, 4, 0)
_NEXT = View(2, _peers(2), 3, 5, 1)
_SAID: list[membership.Message] = [
    Prepare(_VIEW, (2, 1)), Promise(1, (1, 0), 4, ((1, 1), _NEXT)), Promise(1, (1, 0), 4, None), Commit(_NEXT),
    Accept(_VIEW, (2, 1), _NEXT), Accepted(1, (1, 0)), Outbid(1, (9, 2)), Report(1, frozenset({2})), Refused("x"),
    Join("new", (("a", "b"),)), Join("3", ()), Commit(View(2, (*_peers(2), Peer(3, "x")), 4, 5, 1)),
]  # fmt: skip


@parser(ValueError, weight=2)
def views() -> tuple[list[bytes], Parse]:
    """A member reads messages, and acts on them."""

    def parse(data: bytes) -> None:
        keeper = membership.ViewKeeper(Peer(0, "0"), _VIEW, {"a": "b"})
        keeper.suspect([2])
        try:
            said = json.loads(data)
        except RecursionError:
            return
        message = membership.from_plain(said)
        keeper.hear(Peer(1, "1"), message)
        keeper.timeout()
        keeper.hear(Peer(1, "1"), message)

    return [plain(membership.to_plain(message)) for message in _SAID], parse


@parser()
def packets() -> tuple[list[bytes], Parse]:
    """Of a process to the launcher's relay, which ends for none."""
    relay = Relay(3, 2)
    line = relay._pairs[1][1]
    for _, theirs in relay._pairs.values():
        theirs.setblocking(False)

    def parse(data: bytes) -> None:
        with contextlib.suppress(OSError):
            line.send(data)
        relay.read(1)
        assert relay.is_over in (True, False)
        for _, theirs in relay._pairs.values():
            with contextlib.suppress(BlockingIOError):
                while theirs.recv(1 << 17):
                    pass

    valid = [
        plain({"to": 2, "message": membership.to_plain(_SAID[0])}), plain({"ask": 1, "half": [0, 1]}),
        plain({"done": True, "call": 3}), plain({"view": 2, "members": [0, 1]}),
    ]  # fmt: skip
    weakref.finalize(parse, relay.close)
    return valid, parse


@parser(GroupError, agreement.AllDone)
def packets_of_launchers() -> tuple[list[bytes], Parse]:
    """Of the launcher, and of other processes through it, to a member and to a process that joins."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)

    def parse(data: bytes) -> None:
        for number in (0, 3):
            ours.send(data or b"\0")
            line = relay.RelayLine(theirs, number, 3, 1, 4)
            found = agreement.Agreement(line, 0, serves=False)
            found.lost(2)
            packet = line.receive(0.1)
            if packet is not None:
                agreement.join_in(packet)
            found._tell(found._heard(packet))
            found._tell(found._heard(None))
            assert all(Name.read(peer.name) for peer in found.keeper.view.members if number == 0)
            with contextlib.suppress(BlockingIOError):
                while ours.recv(1 << 17):
                    pass

    valid = [plain({"from": 1, "message": membership.to_plain(message)}) for message in _SAID]
    valid += [plain(each) for each in ({"view": 1, "half": [0, 1]}, {"ended": 2}, {"done": 1, "call": 0})]
    for end in (ours, theirs):
        weakref.finalize(parse, end.close)
    return valid, parse


class FarLauncher:
    """The end of a connection that takes everything."""

    name = "there"

    def send(self, frame: Any) -> None:
        json.dumps(frame)

    def close(self) -> None:
        pass


@parser(ProtocolError)
def launchers_that_join() -> tuple[list[bytes], Parse]:
    """The bytes of a launcher whose workers have joined, to that of the run; and the answer to it."""
    relay = Relay(1, 1, 4)
    reception = Reception(relay, "secret", "127.0.0.1")
    reception.close()
    reception._told, reception._run = {}, "run"
    link: Any = FarLauncher()

    def parse(data: bytes) -> None:
        reception._guests[link] = {relay.admit(link.send)}
        try:
            for found in Frames().feed(data):
                reception._heard(link, found)
        finally:
            for number in [*reception._guests.pop(link)]:
                relay.note_end(number, 1)
                relay.drop(number)
            relay._fresh = 1
            assert len(relay._ended) <= 64

    said = {"workers": 1, "version": "1"}, {"from": 1, "packet": {"to": 0, "message": 1}}, {"ended": 1, "status": 0}
    weakref.finalize(parse, relay.close)
    return [*map(in_frame, said), b"".join(map(in_frame, said))], parse


@parser(ProtocolError, GroupError)
def welcomes() -> tuple[list[bytes], Parse]:
    """The answer to a launcher that joins. What it makes of one is at most some lines, and no other variables."""

    link: Any = FarLauncher()

    def parse(data: bytes) -> None:
        for found in Frames().feed(data):
            guest = Guest(link, found, 2, "secret")
            assert guest.shared.keys() <= {*TOLD, "SYNCLINE_RUN_ID", "SYNCLINE_SECRET"}
            guest.close()

    told = {"SYNCLINE_STRATEGY": "ring"}
    welcome = {"numbers": [1, 2], "run": "r", "told": told, "processes": 1, "least": 1, "most": 4, "servers": 0}
    return [in_frame(welcome), in_frame({"refused": "why"})], parse


@parser()
def names() -> tuple[list[bytes], Parse]:
    """Of the processes of an elastic run."""
    return [b"1@127.0.0.1:40000", b"0@::1:1", b"12@host:65535"], lambda data: str(Name.read(text(data)))


# Payloads.


@parser(PayloadError, weight=3)
def payloads() -> tuple[list[bytes], Parse]:
    """The first byte chooses a codec; the rest is decoded, and merged where the codec can."""
    spec = Spec("w", (777,))
    x = np.random.default_rng(0).standard_normal(spec.elements).astype(np.float32)
    codecs: list[Codec] = []
    valid = []
    for name in registry.names("codecs"):
        for example in registry.get("codecs", name).capabilities.get("examples", (name,)):
            codec: Codec = build("codecs", read_part(example))
            if codec.combine == "rounds" or name == "none":
                continue
            room = np.zeros(codec.wire_bytes(spec)[1] // 4 + 1, np.uint32)
            words = codec.encode(x, room, codec.init(spec, 0)).words
            valid.append(bytes([len(codecs)]) + room[:words].tobytes())
            codecs.append(codec)
    into, out = np.zeros(spec.elements + 8, np.float32), np.zeros(4096, np.uint32)

    def parse(data: bytes) -> None:
        codec = codecs[(data[:1] or b"\0")[0] % len(codecs)]
        state = codec.init(spec, 0)
        payload = (
            np.frombuffer(data[1 : 1 + (len(data) - 1) // 4 * 4], np.uint32)
            if len(data) > 4
            else np.zeros(0, np.uint32)
        )
        into[spec.elements :] = 7.0
        with np.errstate(all="ignore"):
            codec.decode(payload.copy(), into[: spec.elements], state)
            if isinstance(codec, Merges):
                codec.merge(payload.copy(), payload.copy(), out, state)
        assert (into[spec.elements :] == 7.0).all(), "it writes beyond its tensor"

    return valid, parse


# Files.


@functools.cache
def _scratch() -> tempfile.TemporaryDirectory[str]:
    """A folder, which is removed at the end of the process that has made it."""
    return tempfile.TemporaryDirectory(prefix="fuzz-")


def _folder(name: str) -> Path:
    path = Path(_scratch().name, name)
    path.mkdir()
    return path


def _at(folder: Path, read: Callable[[Path], object]) -> Parse:
    """Parse by a file of these bytes."""

    def parse(data: bytes) -> object:
        (folder / "file").write_bytes(data)
        return read(folder / "file")

    return parse


@parser(DataError, weight=2)
def checkpoints() -> tuple[list[bytes], Parse]:
    """Files of bytes that anybody may have changed, and headers that lie but have the right checksum."""
    path = _folder("checkpoints") / "whole"
    about = {"version": 1, "step": 1, "save": "0" * 16, "number": 1, "shard": 0, "shards": 1}
    parts = saving._Parts({"w": np.ones((2, 3), np.float32), "n": [1, np.arange(3)]})
    leaves = [(leaf, leaf.copy()) for leaf in parts.leaves.values()]
    saving.write_shard(path, {**about, "tree": parts.tree}, leaves)
    whole = path.read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    head, body = whole[8:size], whole[size:]

    def parse(data: bytes) -> None:
        if data[:1] == b"{":
            data = _signed(data, body)
        saving.parse_shard(Path("file"), np.frombuffer(data, np.uint8))

    return [whole, head], parse


def _signed(head: bytes, body: bytes) -> bytes:
    """The file of a header with its checksum, where it says that it has one."""
    free = re.sub(rb'"sha256": "[0-9a-f]{64}"', b'"sha256": "%s"' % (b"0" * 64), head, count=1)
    digest = hashlib.sha256(free + body).hexdigest().encode()
    head = free.replace(b"0" * 64, digest, 1)
    return len(head).to_bytes(8, "little") + head + body


@parser(DataError)
def folders_of_checkpoints() -> tuple[list[bytes], Parse]:
    """One of two files of a save, whose header lies and has the right checksum, read with the other one."""
    folder = _folder("saves")
    save = {"version": 1, "step": 1, "save": "0" * 16, "number": 1, "shards": 2}
    files = [folder / f"step-1-{'0' * 16}" / f"shard-0000{shard}-of-00002.safetensors" for shard in range(2)]
    files[0].parent.mkdir()
    parts = saving._Parts({"w": np.ones((2, 3), np.float32), "n": [1, np.arange(3), (None, 2.5)]})
    for shard, leaf in enumerate(parts.leaves.values()):
        saving.write_shard(files[shard], {**save, "shard": shard, "tree": parts.tree}, [(leaf, leaf.copy())])
    whole = files[0].read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    head, body = whole[8:size], whole[size:]
    alone: Any = SimpleNamespace(
        rank=0, world_size=1, name=lambda _: "rank 0", gather=lambda said: [said], tell_all=lambda said, _: said
    )
    found = saving.Checkpoints(lambda: alone, folder, 2)

    def parse(data: bytes) -> None:
        files[0].write_bytes(_signed(data, body) if data[:1] == b"{" else data)
        found.load(1)

    return [whole, head], parse


@parser(UsageError, NotBuiltError)
def logs_of_steps() -> tuple[list[bytes], Parse]:
    """A run's samples, and their repetition for an epoch."""
    order = SampleOrder(4, shuffle=False, global_batch=2)
    how = {"strategy": "ring", "algorithms": [[0, "ring"]], "members": [0, 1], "view": 1, "nodes": [0, 0]}
    lines = [
        plain({"sampler": 0, "epoch": 0, "step": step, **how, "samples": [2 * step, 2 * step + 1]}) for step in range(2)
    ]

    def read(path: Path) -> None:
        repeated = RepeatedBatches(order, str(path))
        assert len(repeated) >= order.steps
        for _ in repeated:
            line = repeated.line
            Strategy.parse(line["strategy"])
            Choice.read(line["algorithms"] or [[0, "ring"]])
            repeated.commit()

    return [b"\n".join(lines), *lines], _at(_folder("steps"), read)


@parser(ValueError)
def samples() -> tuple[list[bytes], Parse]:
    """A process's part of a timeline: rows and names, one after the other."""
    file = spans.SpanFile(_folder("samples"), "one", {"process": 3, "session": 0}, lambda: 1.0)
    begin(file, "run", "bucket 7", key=7, nbytes=8).end()
    begin(file, "send", "bucket 7", key=7, peer=2).end()
    file.note(clock=[[1.0, 0.5, 0.25], [2.0, 0.5, 0.25]])
    file.close()
    rows, named = (path.read_bytes() for path in file.paths[:2])
    rows = rows[: 6 * spans._ROW.size]
    at = len(rows)
    return [rows + named], lambda data: spans.offset_of(spans.parse(data[:at], data[at:]).notes)


@parser(UsageError, weight=0.1)
def recordings() -> tuple[list[bytes], Parse]:
    """Of two processes: the files of one as they come, merged with the other's, and read as a timeline."""
    folder = _folder("recordings")
    parts = folder / "parts"
    parts.mkdir(0o700)
    for process in range(2):
        file = spans.SpanFile(
            parts, f"process-{process}-0", {"process": process, "session": 0, "run": "r", "workers": 2}
        )
        begin(file, "run", "bucket 7", key=7, nbytes=8).end()
        begin(file, "send", "bucket 7", key=7, peer=1 - process, phase="step 1").end()
        file.note(
            clock=[[1.0, 0.5, 0.25]], name=f"rank {process}", strategy="ring", cores={"usable": [0], "wall_s": 1.0}
        )
        file.close()
        paths = file.paths
    rows, named = (path.read_bytes() for path in paths[:2])
    rows = rows[: 4 * spans._ROW.size]
    at = len(rows)

    def parse(data: bytes) -> None:
        paths[0].write_bytes(data[:at])
        paths[1].write_bytes(data[at:])
        write_all(folder / "t.json", parts)
        for run in read_timeline(folder / "t.json"):
            with contextlib.suppress(UsageError):
                causes(run)

    return [rows + named], parse


@parser()
def memory_of_reports() -> tuple[list[bytes], Parse]:
    """What ranks tell their launcher in memory that it shares with them: who failed first, and who is there."""
    memory = reports.Reports(3)
    with mock.patch.dict(os.environ, memory.environ(1)):
        reports.blame(1, "rank 1", "failed: x", own=True)
    valid = os.pread(memory.fd, 64, 0)

    def parse(data: bytes) -> None:
        os.pwrite(memory.fd, data[: 1 << 14], 0)
        found = memory.culprit()
        assert found is None or len(found[1]) < 1 << 16
        assert memory.present(2) in (True, False)

    weakref.finalize(parse, memory.close)
    return [valid], parse


@parser(ValueError)
def flight_parts() -> tuple[list[bytes], Parse]:
    """The memory of a process that has ended; its beginning is given, the rest is zeros."""
    where = mmap.mmap(-1, BYTES)
    one = Flight(where, 1, {"name": "rank 1", "processes": 3, "workers": 3, "run": "r"})
    one.group(100, 10, [0, 2])
    one.end(one.begin(1, "bucket", 4))
    one.fault(ValueError("x"), 1, {2: "bucket 1"})
    first, second = where[:4096], where[flight.ROWS_AT : flight.ROWS_AT + 512]

    def parse(data: bytes) -> None:
        memory = bytearray(BYTES)
        memory[: min(4096, len(data))] = data[:4096]
        rest = data[4096:8192]
        memory[flight.ROWS_AT : flight.ROWS_AT + len(rest)] = rest
        found = flight.parse(bytes(memory))
        if found is not None:
            record = flight.merge([found])
            assert record is None or json.loads(flight.dump(record), parse_constant=_refused)

    return [first + second], parse


def _refused(name: str) -> None:
    raise AssertionError(f"{name} is no JSON")


@parser(UsageError)
def flight_records() -> tuple[list[bytes], Parse]:
    operation = flight.FlightOperation(1, 2, 8, 1, 4, 9.0, 0.0, False, "bucket 1")
    fault = flight.Fault("PeerLost", "rank 2 died", 2, {2: "bucket 3"})
    about: dict[str, Any] = {"begun": 1, "processes": 3, "workers": 3, "at_s": 20.0}
    whole = flight.merge(
        flight.ProcessFlight(rank, f"rank {rank}", (operation,), fault=fault if rank else None, **about)
        for rank in range(3)
    )
    assert whole is not None
    return [flight.dump(whole).encode()], _at(_folder("flights"), explain_flight)


@parser(UsageError, weight=0.5)
def timelines() -> tuple[list[bytes], Parse]:
    folder = _folder("timelines")
    chrome.write(folder / "t.json.gz", [Planted(workers=2, steps=4, buckets=(1000,)).run()])
    packed = (folder / "t.json.gz").read_bytes()

    def read(path: Path) -> None:
        for run in read_timeline(path):
            causes(run)

    return [packed, *[gzip.decompress(packed)] * 3], _at(folder, read)


@parser(ValueError)
def notes_of_doctor() -> tuple[list[bytes], Parse]:
    """What a host tells rank 0 of itself and its links, and rank 0 of the hosts; it is judged with two sound ones."""
    way = Way("10.0.0.1", "eth0", 1500, "it leads to rank 0", "eth0 (10.0.0.1)")
    hosts = [
        Seen(rank, f"h{rank}", way, {"torch": "2.13.0"}, [Finding("memory", "ok", "much")], {}) for rank in range(3)
    ]
    links = Links({(0, 1): 1e9, (2, 1): None}, {(1, 0): Offset(0.5, 1e-4), (1, 2): Offset(0.0, 1e-4)})
    told = replace(hosts[1], unreached={2: "timed out"}).to_json()

    def parse(data: bytes) -> None:
        seen, heard = list(hosts), Links(dict(links.rates), dict(links.clocks))
        if data[:1] == b"{":
            seen[1] = Seen.from_json(data, range(3))
            seen[1].rank = 1
        elif b"]]," in data:
            heard.add_json(data, 1, range(3))
        else:
            there, failed = read_reached(data, range(3))
            assert {*there, *(rank for pair in failed for rank in pair)} <= {0, 1, 2}
        for finding in judged(seen, heard, 3):
            assert finding.text.isprintable()

    return [told, links.to_json(), plain([[0, 1, 2], [[0, 1]]])], parse


@parser(DataError, weight=0.2)
def pictures_of_cifar10() -> tuple[list[bytes], Parse]:
    """Where the data are, as the user says, with one of their files as it comes."""
    folder = _folder("pictures")
    part = bytes(cifar10.RECORD_BYTES)
    for name in cifar10.PARTS:
        (folder / f"{name}.bin").write_bytes(part)

    def parse(data: bytes) -> None:
        (folder / f"{cifar10.PARTS[0]}.bin").write_bytes(data)
        cifar10.read(folder)

    return [part], parse


@parser(DataError)
def traces() -> tuple[list[bytes], Parse]:
    valid = [
        b"name,elements,forward_s,backward_s\nconv1,100,0.1,0.2\nfc,20,0.01,0.02\n",
        b"name,elements,forward_s,backward_s,h2d_s,device,shape,rows\nconv1,6,1e-3,2e-3,0.5,cpu,2x3,0.5\n",
    ]
    return valid, _at(_folder("traces"), read_trace)


@parser(DataError)
def networks() -> tuple[list[bytes], Parse]:
    valid = [to_json(load_network(name)).encode() for name in ("10gbe", "ib100")]
    return valid, lambda data: parse_network(text(data), "here")


@parser(DataError)
def holdouts() -> tuple[list[bytes], Parse]:
    valid = plain({"rows": [{"predicted_s": 1.0, "measured_s": 2.0}], "source": "s", "date": "d", "fitted": "f"})
    return [valid], lambda data: parse_holdout(text(data), "here")


_RESULTS = (
    AccuracyResult, BenchResult, CodecResult, CollectivePrediction, GradientResult, Prediction, Result, StepResult,
    Tuned,
)  # fmt: skip


@parser(DataError, weight=2)
def results() -> tuple[list[bytes], Parse]:
    """Of all kinds: each is read by all."""
    valid = []
    for kind in _RESULTS:
        fields = {one.name: _example(str(one.type)) for one in dataclasses.fields(kind)}
        valid.append(plain(fields | {"machine": "m"}))
        kind.from_json(text(valid[-1]))  # raises for what it would refuse

    def parse(data: bytes) -> None:
        said = text(data)
        for kind in _RESULTS:
            with contextlib.suppress(DataError):
                assert kind.from_json(kind.from_json(said).to_json()) is not None

    return valid, parse


def _example(kind: str) -> Any:
    """A value of a type, from its annotation."""
    containers = ("tuple[", []), ("list[", []), ("Mapping[", {})
    for name, value in (*containers, ("None", None), ("bool", True), ("int", 3), ("float", 0.5)):
        if name in kind:
            return value
    return "text"


@parser(UsageError)
def explained_results() -> tuple[list[bytes], Parse]:
    row = Row(
        "ring", 4, iteration_s=0.1, loading_s=0.001, forward_s=0.02, backward_s=0.04, update_s=0.002, compute_s=0.063,
        exposed_comm_s=0.002, compute_by_rank_s=(0.06, 0.06), iterations=20, warmup=2,
    )  # fmt: skip
    rows = (replace(row, strategy="single", workers=1), row, replace(row, strategy="tree", iteration_s=0.4))
    tried = Tried("tree", measured_s=0.05, times_s=(0.05,)), Tried("direct", measured_s=0.3), Tried("ps", why="failed")
    made = Tuned(best="tree", iteration_s=0.05, default="auto", default_iteration_s=0.1, tried=tried, workers=4)
    measured = [Measured("tcp", "ring", 4, 1000 * size, median_s=1e-3 * size, correct=True) for size in (1, 9, 99)]
    whole = Result(workload="digits", rows=rows), made, BenchResult(rows=tuple(measured))
    valid = [one.to_json().encode() for one in whole]
    return valid, lambda data: explain_result(Path("file"), text(data))


@parser(SynclineError)
def reports_of_benches() -> tuple[list[bytes], Parse]:
    """What a process that is measured reports to its starter."""
    return [plain({"kind": "error", "text": "x"})], lambda data: messages._parse(1, data)


@parser(ValueError)
def answers_of_metrics() -> tuple[list[bytes], Parse]:
    valid = [
        b'syncline_info{rank="1",strategy="ring",workers="2",ports="9000-9001"} 1\nsyncline_steps_total 17\n'
        b'syncline_sent_bytes_total{peer="0"} 5e3\nsyncline_staleness_steps_count 3\nsyncline_staleness_steps_sum 4\n'
    ]
    return valid, lambda data: top.read(data.decode(errors="replace"))
