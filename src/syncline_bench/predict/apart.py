"""Iterations where every push is an update by itself: asynchronous and stale training, and backup workers.

Owns how workers, ports and owners come together there. Who is released when is decided by the very ``Ledger`` that an
owner keeps in a run; here its messages come from simulated workers, each of which pushes and pulls for itself.

All owners have as much of every bucket, so that one stands for all: each worker pushes it the S-th part of a bucket,
and its port has S such messages to send. An owner does one thing after the other, in the order in which pushes have
come. Serving workers count as owners with ports of their own.
"""

from __future__ import annotations

from collections import Counter
from functools import partial

from syncline.compression.traffic import parts_of
from syncline.costs.virtual import Call, Clock, Operations
from syncline.costs.worker import Handed, VirtualWorker, run
from syncline.engine.step import Steps, Submit
from syncline.errors import UsageError
from syncline.nouns import Group
from syncline.serving import protocol
from syncline.serving.protocol import ALL, Ledger, Request
from syncline.strategy.words import NONE

from .loads import Placement
from .messages import Fabric
from .models import Model
from .settings import Habits, Iteration, Machines, Setting, codec_costs, duties_of, lay_out, stretch_of

_BEFORE, _COUNTED, _DRAWN = 5, 12, 60
"""Steps of the slowest worker until it counts, and those that count, where workers are held up at random as well."""


_MOST_WORKERS = 128


class Apart:
    """Workers that push and pull by themselves; raises UsageError for more than can be simulated in good time."""

    def __init__(self, setting: Setting, model: Model, habits: Habits) -> None:
        if setting.workers > _MOST_WORKERS:
            raise UsageError(
                f"{setting.strategy}: workers that push by themselves are simulated one by one, and {setting.workers}"
                f" take too long: predict up to {_MOST_WORKERS}"
            )
        self._setting, self._model = setting, model
        self._cluster, self._workers = setting.cluster, range(setting.workers)
        self._laid = lay_out(setting, model)
        self._schedule = setting.strategy.schedule_object()
        # A pull is an operation of its own in a run: a push that awaits one keeps no other from going.
        self._in_flight = habits.in_flight or len(self._laid.buckets) * setting.workers
        self._clock = Clock()
        roles = setting.strategy.roles
        assert roles is not None
        self._owners = roles.owners
        self._codec = codec_costs(setting)
        self._payload = [self._payload_bytes(bucket) for bucket in range(len(self._laid.buckets))]
        placement = Placement(Group(setting.workers, 1), setting.placement.per_host)
        self._fabric = Fabric(self._clock, self._cluster, placement)
        self._owner, self._owners_host = setting.workers, placement.count - 1
        self._fabric.narrow(range(self._owners_host), self._owners)
        self._machines = Machines(setting, self._clock)
        self._serving = self._machines.serving(self._owners)
        by_bucket = self._schedule.apply == "layer"
        self._parts = range(len(self._laid.buckets)) if by_bucket else (ALL,)
        self._ledger = Ledger(setting.workers, setting.strategy.sync_mode(), tuple(self._parts))
        self._left = [[len(self._laid.buckets)] for _ in self._workers]
        self._pulls: dict[tuple[int, int], Call] = {}  # of a worker and a bucket, what is done when it has it
        self._version = [0] * len(self._laid.buckets)
        self._sent = [[0] * len(self._laid.buckets) for _ in self._workers]
        self._staleness: Counter[int] = Counter()
        self._made = [self._worker(worker) for worker in self._workers]

    def run(self) -> Iteration:
        """Simulate; an iteration is what so many workers together need for one each."""
        counted = _DRAWN if self._model.speed.jitter else _COUNTED
        begun_s, begun = self._look(_BEFORE)
        ended_s, ended = self._look(_BEFORE + counted)
        steps = sum(after - before for before, after in zip(begun, ended, strict=True))
        iteration_s = (ended_s - begun_s) * len(self._workers) / steps
        mean = dict.fromkeys(("loading_s", "h2d_s", "forward_s", "backward_s", "update_s", "other_s"), 0.0)
        for worker in self._made:
            for name in mean:
                mean[name] += getattr(worker.spent, name) / len(worker.spent.ends_s) / len(self._made)
        exposed_s = sum(one.spent.waited_s / len(one.spent.ends_s) for one in self._made) / len(self._made)
        total = sum(len(one.spent.ends_s) for one in self._made)
        busy_s = dict.fromkeys(("back", "inside", "cores"), 0.0) | {
            "port": self._fabric.sent_s[self._owners_host] / total * len(self._workers),
            "serving": self._serving.busy_s / total * len(self._workers),
        }
        return Iteration(
            iteration_s=iteration_s, exposed_s=exposed_s, busy_s=busy_s, staleness=dict(self._staleness), **mean
        )

    def _look(self, steps: int) -> tuple[float, list[int]]:
        """When the slowest has made so many steps, and how many all have made then."""
        self._clock.run(over=lambda: all(len(worker.spent.ends_s) >= steps for worker in self._made))
        made = [len(worker.spent.ends_s) for worker in self._made]
        if min(made) < steps:
            raise UsageError(f"under {self._setting.strategy} the simulated training waits for what nothing leads to")
        return self._clock.now_s, made

    def _worker(self, worker: int) -> VirtualWorker:
        steps = Steps(
            len(self._model.layers), self._laid, self._schedule, self._setting.strategy.sync_mode(), held=True
        )
        cores = {"cores": self._machines.worker(worker)}
        operations = Operations(self._clock, partial(self._push, worker), self._in_flight)
        duties = duties_of(self._setting, self._model, self._laid)
        handed = Handed(operations.submit, lambda _: None)
        found = VirtualWorker(self._clock, duties, steps, handed, stretch_of(self._model, worker))
        # Workers that begin together and are alike would do so forever, and share every port at the same time.
        begin_s = worker / len(self._workers) * self._model.computing_s
        self._clock.at(begin_s, partial(run, self._clock, found.iterations(), cores, operations))
        return found

    def _payload_bytes(self, number: int) -> float:
        """What of a bucket is pushed."""
        bucket = self._laid.buckets[number]
        if self._setting.strategy.codec == NONE:
            return float(bucket.nbytes)
        parts = parts_of(self._setting.strategy.codec_object(), self._model.layers, bucket)
        return float(sum(part.codec.wire_bytes(part.state.spec)[0] for part in parts))

    # One bucket of one worker: there, taken in, and back.

    def _push(self, worker: int, submit: Submit, serial: int, ended: Call) -> None:
        bucket = submit.operation.bucket
        self._pulls[worker, bucket] = ended
        encode_s = self._laid.buckets[bucket].nbytes * self._codec.encode_s_per_byte
        urgency = submit.priority, serial, 0
        come = partial(self._pushed, worker, bucket, submit.operation.step + 1)
        nbytes = self._payload[bucket] / self._owners
        self._clock.at(
            self._clock.now_s + encode_s,
            partial(self._fabric.send, worker, self._owner, nbytes, urgency, come),
        )

    def _pushed(self, worker: int, bucket: int, clock: int) -> None:
        """A bucket has come to the owner, which hears of it by itself, or of all of the step."""
        taken_s = self._laid.buckets[bucket].nbytes / self._owners * self._codec.decode_s_per_byte
        taken_s += self._moving_s(self._payload[bucket] / self._owners)
        told = bucket
        if len(self._parts) == 1 and self._parts[0] == ALL:
            self._left[worker][0] -= 1
            told = ALL
            if self._left[worker][0]:
                self._serving.use(taken_s, lambda: None)
                return
            self._left[worker][0] = len(self._laid.buckets)
        self._serving.use(taken_s, partial(self._handle, Request("push", worker, clock, {}, told)))

    def _handle(self, request: Request) -> None:
        for action in self._ledger.handle(request):
            self._act(action)

    def _act(self, action: protocol.Action) -> None:
        if isinstance(action, protocol.Measure):
            return
        buckets = range(len(self._laid.buckets)) if action.bucket == ALL else (action.bucket,)
        owned = sum(self._laid.buckets[bucket].nbytes for bucket in buckets) / self._owners
        if isinstance(action, protocol.Apply):
            for bucket in buckets:
                self._version[bucket] += 1
            copied_s = 0.0 if action.worker == ALL else owned * self._cluster.copy_s_per_byte
            self._serving.use(copied_s + owned * self._cluster.update_s_per_byte, lambda: None)
        elif isinstance(action, protocol.Add):
            self._serving.use(owned * self._cluster.gamma_s_per_byte, lambda: None)
        else:
            for worker, ahead in zip(action.workers, action.ahead, strict=True):
                if action.bucket in (ALL, 0):
                    self._staleness[ahead] += 1
                for bucket in buckets:
                    self._release(worker, bucket)

    def _release(self, worker: int, bucket: int) -> None:
        """Copy what a worker shall have, and send it: updates that it has not, where these are less than all."""
        nbytes = self._laid.buckets[bucket].nbytes
        lag = self._version[bucket] - self._sent[worker][bucket]
        self._sent[worker][bucket] = self._version[bucket]
        sent = min(float(nbytes), lag * self._payload[bucket]) / self._owners
        urgency = self._laid.priorities[bucket], 0, 0
        ended = self._pulls.pop((worker, bucket))
        decode_s = 0.0 if self._setting.strategy.codec == NONE else nbytes * self._codec.decode_s_per_byte
        back = partial(self._clock_after, decode_s, ended)
        copied_s = nbytes / self._owners * self._cluster.copy_s_per_byte + self._moving_s(sent)
        send = partial(self._fabric.send, self._owner, worker, sent, urgency, back)
        self._serving.use(copied_s, send)

    def _moving_s(self, nbytes: float) -> float:
        """What a message costs an owner's processor."""
        return self._cluster.message_s + nbytes * self._cluster.byte_cpu_s

    def _clock_after(self, seconds: float, call: Call) -> None:
        self._clock.at(self._clock.now_s + seconds, call)
