"""What ranks of an elastic run do: train, and die, break or wait for a new worker at given steps."""

from __future__ import annotations

import atexit
import itertools
import math
import os
import select
import signal
import time
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle
from typing import Any

import torch
from rank_bodies import SECRET

import syncline
from syncline.frameworks.torch.prepare import Given, GroupValues, Prepared
from syncline.global_batches import GlobalBatches, SampleLog
from syncline.launch import relay
from syncline.membership import ViewKeeper
from syncline.process import process
from syncline.recovery import agreement, members
from syncline.serving.owner import Owner
from syncline.serving.owners import RemoteOwners
from syncline.session.session import Session
from syncline.strategy.strategy import Strategy
from syncline.training.owners import OwnedModel

WAIT_S = 60.0
SAMPLES, BATCH, EPOCHS = 22, 6, 3
STEPS = 4  # of an epoch


def problem(samples: int = SAMPLES) -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Any]:
    """Data, a model, its optimizer and a schedule of its learning rate."""
    numbers = torch.Generator().manual_seed(1)
    x, y = (torch.randn(samples, size, generator=numbers, dtype=torch.float64) for size in (5, 2))
    model = torch.nn.Linear(5, 2, dtype=torch.float64)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.25)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    return x, y, model, optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def learn(x: torch.Tensor, y: torch.Tensor, model: torch.nn.Module, optimizer: Any, scheduler: Any) -> None:
    """One step. It ends by dropping the gradients, so that one which breaks leaves them to the next."""
    torch.nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
    optimizer.step()
    optimizer.zero_grad()
    scheduler.step()


def die(*_: object) -> None:
    """End this process at once."""
    os.kill(os.getpid(), signal.SIGKILL)


def await_a_join() -> None:
    """Wait until a worker asks to join, on the worker that looks for it."""
    found: agreement.Agreement = process.elastic.agreement
    found._look_s = 0.0
    while not found.is_asked():
        found._look_s = 0.0
        assert select.select([found.line._sock], [], [], WAIT_S)[0]


def train(line: Connection, index: int, processes: int, address: str, least: int, plan: dict[str, Any]) -> None:
    """Train elastically. ``plan`` has what happens to this process, and at which step of the run."""
    fd = recv_handle(line)
    host, _, port = address.rpartition(":")
    number, joins = str(index), index >= processes
    place, all_of_them = ("0", "1") if joins else (number, str(processes))
    servers, apart = (0 if joins else plan.get("servers", 0)), plan.get("servers", 0)
    rank, world = min(int(place), int(all_of_them) - servers - 1), int(all_of_them) - servers
    numbers = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    numbers["SYNCLINE_SERVERS"] = servers
    variable = f"{fd}:{index}:{processes}:{least}:{plan.get('most', 0)}"
    variable += f":{apart}:{int(plan.get('serves', False))}" if apart else ""
    os.environ.update(
        {relay.VARIABLE: variable, "SYNCLINE_LAUNCHER": str(os.getppid())},
        **{name: str(number) for name, number in numbers.items()},
        SYNCLINE_PROCESS=place, SYNCLINE_PROCESSES=all_of_them, MASTER_ADDR=host, SYNCLINE_MEETING_PORT=port,
        SYNCLINE_SAMPLES=plan.get("samples", ""), SYNCLINE_RUN_ID="elastic",
    )  # fmt: skip
    happenings = plan.get(number, [])
    happenings = [happenings] if happenings and isinstance(happenings[0], str) else happenings

    def happen(now: str, step: int) -> None:
        points.on = step in Points.STEPS or "whenever" in plan
        if [now, step] in happenings:
            if now == "raise":
                raise RuntimeError("a bug of one worker")
            if now == "join":
                line.send("waits")
                await_a_join()
                return
            time.sleep(0.3 if now == "rested" else 0.0)
            os.kill(os.getpid(), signal.SIGSTOP if now == "stop" else signal.SIGKILL)

    points = Points(plan.get("die", {}).get(number, ""))
    points.on = index >= int(all_of_them) - servers  # a server knows no steps
    if "die" in plan:
        points.watch()
    for when in ("beginning", "restoring"):  # it dies before it connects, or with the weights that others wait for
        if [when, -1] in happenings:
            setattr(members.Members, {"beginning": "_begin", "restoring": "_restore"}[when], die)
    members._CONNECT_S = plan.get("connect_s", members._CONNECT_S)
    agreement.LOOK_S = math.inf  # it looks for new workers where the plan says so
    for what, step in happenings:
        if what in ("updates", "updated", "late", "pushed", "loads"):
            in_step(what, step)
        elif what == "loading":
            die_loading(step)
        elif what == "misses":
            miss_a_message(step)
    syncline.init(plan["strategy"], secret=SECRET, liveness=2.0, elastic=plan.get("asks"))

    def made() -> tuple[torch.Tensor, torch.Tensor, torch.nn.Module, torch.optim.Optimizer, Any]:
        x, y, model, *rest = problem(plan.get("even", SAMPLES))
        if ["other", -1] in happenings:
            model = torch.nn.Sequential(model)
        elif joins:  # the others must replace these values
            torch.nn.init.constant_(model.weight, 9.0)
        if "norm" in plan:
            norm = torch.nn.BatchNorm1d(2, affine=False, dtype=torch.float64)
            model = torch.nn.Sequential(model, norm)
            atexit.register(lambda: print(f"{norm.num_batches_tracked} batches"))
        if plan.get("evaluates"):  # a worker trains such a model too
            model.eval()
        return x, y, model, *rest

    together = Strategy.parse(plan["strategy"]).sync_mode().merges
    try:
        learnt = learn_all(happen, made) if together else learn_at_own_pace(happen)
    except SystemExit:
        held = process.elastic._held._by_step if process.elastic else ()
        print("this server has parts of", len(held), "steps before")
        raise
    stats = syncline.stats()
    line.send([*learnt, syncline.rank(), list(stats.members), stats.repairs, points.passed])
    syncline.shutdown()


def in_step(what: str, when: int) -> None:
    """Die when about to make an update of a step (``updates``), or once it is made and the follower may lack it.

    ``late``: begin the pulls of the step after the others have made it and one of them has died. ``pushed``: die with a
    push that the owners may have applied. ``loads``: die after a loss, when one of the servers has the state again.
    """
    traced, pulls, told, put = Owner._traced, OwnedModel._pulls, RemoteOwners.tell, RemoteOwners._put

    def update(owner: Owner, action: Any, bucket: int) -> None:
        if what == "updated" or action.clock != when + 1:
            traced(owner, action, bucket)
        if action.clock == when + 1:
            os.kill(os.getpid(), signal.SIGKILL)

    def pull(owned: OwnedModel) -> Any:
        if owned.steps == when + 1 and not owned.exchange.session.numbers:  # in the first view
            time.sleep(0.7)
        return pulls(owned)

    def tell(owners: RemoteOwners, clock: int, *rest: Any) -> None:
        told(owners, clock, *rest)
        if clock == when + 1 and what == "pushed":
            time.sleep(0.1)
            os.kill(os.getpid(), signal.SIGKILL)

    def load(owners: RemoteOwners, *request: Any) -> None:
        if owners._session.numbers:  # after a loss
            owners._servers = owners._servers[:1]
            put(owners, *request)
            os.kill(os.getpid(), signal.SIGKILL)
        put(owners, *request)

    if what == "loads":
        RemoteOwners._put = load  # type: ignore[method-assign]
    elif what == "pushed":
        RemoteOwners.tell = tell  # type: ignore[method-assign]
    elif what == "late":
        OwnedModel._pulls = pull  # type: ignore[method-assign]
    else:
        Owner._traced = update  # type: ignore[method-assign]


def die_loading(when: int) -> None:
    """Die when about to tell the servers the optimizer's state for the given time."""
    load, count = RemoteOwners.load, itertools.count(1)

    def loading(owners: RemoteOwners, records: list[Any]) -> None:
        if next(count) == when:
            die()
        load(owners, records)

    RemoteOwners.load = loading  # type: ignore[method-assign]


def miss_a_message(sender: int) -> None:
    """In the second view: wait for one more message of that rank, after everything that rank 0 needs of this one."""
    hand_out = members.Members._hand_out_again

    def missing(mine: members.Members, view: Any, samplers: Any) -> None:
        hand_out(mine, view, samplers)
        if view.number == 2:
            session = process.session
            session.engine.wait(session.recv(sender, "what never comes", 8, topic=1 << 9))

    members.Members._hand_out_again = missing  # type: ignore[method-assign]


class Points:
    """The points of an agreement on members, and of what follows from it, by name: this process dies at one of them.

    They are those of a step without a loss, of the next one, which a loss breaks, and of the run's end.
    """

    STEPS = 4, 5, EPOCHS * STEPS

    def __init__(self, last: str) -> None:
        self._last, self.on = last, False
        self.passed: list[str] = []
        self._counts: Counter[str] = Counter()

    def _pass(self, name: str) -> None:
        if not self.on:
            return
        self._counts[name] += 1
        self.passed.append(f"{name} {self._counts[name]}")
        if self._last == self.passed[-1]:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(self) -> None:
        """Put points before and after the calls that matter."""
        mine = members.Members
        for owner, name in (
            (mine, "count"), (GlobalBatches, "commit"), (SampleLog, "write"), (mine, "go_on"),
            (Prepared, "hold_parts"), (type(process), "lose"), (Given, "keep_values"),
            (type(process), "begin_again"), (Given, "copy_again"),
            (Given, "put_together_again"), (Given, "prepare_again"),
            (Session, "tell_all"), (GroupValues, "load_state_dict"),
            (GlobalBatches, "divide"), (ViewKeeper, "restored"), (relay.RelayLine, "send"),
            (relay.RelayLine, "receive"), (agreement.Agreement, "tell_done"),
        ):  # fmt: skip
            self._around(owner, name)

    def _around(self, owner: Any, name: str) -> None:
        call = getattr(owner, name)

        def watched(*arguments: Any) -> Any:
            sent = f" {_kind(arguments[1])}" if name == "send" else ""
            if name != "receive":
                self._pass(f"before {name}{sent}")
            found = call(*arguments)
            if name != "receive" or found:
                self._pass(f"after {name}{sent or (f' {_kind(found)}' if name == 'receive' else '')}")
            return found

        setattr(owner, name, watched)


def _kind(packet: dict[str, Any]) -> str:
    return str(packet["message"][0]) if "message" in packet else next(iter(packet))


def learn_all(
    happen: Callable[[str, int], None] = lambda *_: None, made: Callable[[], Any] = problem
) -> tuple[list[float], float, int]:
    """All epochs in a run that has begun: the weights, the learning rate, and the calls of the training function."""
    x, y, model, optimizer, scheduler = made()
    if len(x) % BATCH:
        syncline.prepare(model, optimizer, weight="batch")
    else:
        syncline.prepare(model, optimizer)
    sampler = syncline.sampler(len(x), global_batch=BATCH, seed=4)
    calls = 0

    def course() -> None:
        nonlocal calls
        calls += 1
        while sampler.epoch < EPOCHS:
            for batch in sampler:
                for now in ("join", "before", "stop", "raise"):
                    happen(now, sampler.epoch * STEPS + sampler.step)
                learn(x[batch], y[batch], model, optimizer, scheduler)
                sampler.commit()
                for now in ("after", "rested"):
                    happen(now, sampler.epoch * STEPS + sampler.step)

    syncline.elastic(course, [scheduler])
    weights = [parameter.detach().reshape(-1).tolist() for parameter in model.parameters()]
    return [weight for tensor in weights for weight in tensor], optimizer.param_groups[0]["lr"], calls


RATE = 1 / 32
PIECE = 2


def numbers() -> torch.Tensor:
    """Data whose sums are exact in any order."""
    return torch.randint(-8, 9, (SAMPLES, 5), generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def learn_at_own_pace(happen: Callable[[str, int], None]) -> list[Any]:
    """Steps at each worker's own pace, whose gradients do not depend on the weights: these tell which samples are in
    them how often. Returns the weights, the steps of this worker and the greatest staleness of one."""
    x, model = numbers(), torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
    torch.nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    syncline.prepare(model, optimizer)
    sampler = syncline.sampler(SAMPLES, batch_size=PIECE, seed=4)
    steps = ahead = 0

    def course() -> None:
        nonlocal steps, ahead
        # A worker that owns nothing any more, and makes no step, must not offer older parts if all owners are lost.
        assert not process.elastic._held.told
        while sampler.epoch < EPOCHS:
            for batch in sampler:
                happen("join", steps)
                happen("before", steps)
                share = (
                    1 if "rate=own" in syncline.stats().strategy else syncline.world_size()
                )  # else each push has 1/N
                (share * model(x[batch]).sum()).backward()
                optimizer.step()
                optimizer.zero_grad()
                happen("after", steps)
                sampler.commit()
                steps += 1
                ahead = max([ahead, *syncline.stats().staleness])

    syncline.elastic(course)
    return [model.weight.reshape(-1).tolist(), steps, ahead]
