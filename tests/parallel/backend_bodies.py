"""What ranks of the pool do with torch.distributed over the backend syncline, or gloo."""

from __future__ import annotations

import os
import signal
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from rank_bodies import SECRET, Place
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import syncline
from syncline.compression.reducers import owners
from syncline.torch_backend.hook import CompressedBucket

BATCH = 12
LIMIT = timedelta(seconds=60)


@contextmanager
def grouped(place: Place, backend: str, **options: Any) -> Iterator[int]:
    rank, world, address = place
    host, _, port = address.rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, SYNCLINE_SECRET=SECRET)
    options.setdefault("timeout", LIMIT)
    if backend == "gloo" or options["timeout"] < LIMIT:  # which begins to count when all have come to the store
        options["store"] = dist.TCPStore(host, int(port), world, is_master=rank == 0, timeout=LIMIT)
    dist.init_process_group(backend, rank=rank, world_size=world, **options)
    yield rank
    if backend == "gloo":
        leave_together(options["store"], rank, world)
        _kept.append(dist.group.WORLD)
    dist.destroy_process_group()


_kept: list[Any] = []
"""Groups over Gloo, as long as the process lasts: what ends one holds the interpreter lock and waits for its threads,
one of which may need the lock to let go of a work of DistributedDataParallel's."""


def leave_together(store: dist.Store, rank: int, world: int) -> None:
    """Gloo may wait for ever for what it was sending when the other end closed: no rank goes before all have done."""
    limit = timedelta(seconds=60)  # however long one has waited for what the other could not send
    store.set(f"done {rank}", "")
    store.wait([f"done {other}" for other in range(world)], limit)
    store.set(f"left {rank}", "")
    if rank == 0:  # the store is its
        store.wait([f"left {other}" for other in range(world)], limit)


def build(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.BatchNorm2d(4),
        torch.nn.Flatten(),
        torch.nn.Linear(64, 200),
        torch.nn.Tanh(),
        torch.nn.Linear(200, 5),
    )


def train(model: torch.nn.Module, rank: int, world: int, count: int = 4, first: int = 0) -> list[float]:
    update = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(first, first + count):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(BATCH, 1, 6, 6, generator=generator), torch.randint(0, 5, (BATCH,), generator=generator)
        share = slice(rank, None, world)
        loss = torch.nn.functional.cross_entropy(model(x[share]), y[share])
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
    return losses


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [value.detach().clone() for value in model.state_dict().values()]


def ddp(line: Connection, place: Place, backend: str) -> None:
    """The weights after some steps; each rank begins with others."""
    with grouped(place, backend) as rank:
        model = DistributedDataParallel(build(rank), bucket_cap_mb=0.03)
        train(model, rank, place[1])
        line.send([dist.get_backend(), [tensor.numpy() for tensor in weights(model.module)]])


def sharded(line: Connection, place: Place) -> None:
    """FSDP2 on the CPU over a mesh, beside DDP in the same group."""
    from torch.distributed.fsdp import fully_shard

    with grouped(place, "syncline") as rank, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, of its own names
        plain = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
        torch.manual_seed(1)
        for parameter in plain.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        other = torch.nn.Sequential(torch.nn.Linear(7, 33), torch.nn.Tanh(), torch.nn.Linear(33, 5))
        other.load_state_dict(plain.state_dict())
        mesh = init_device_mesh("cpu", (place[1],))
        for layer in (other[0], other[2], other):
            fully_shard(layer, mesh=mesh)
        replicated = DistributedDataParallel(plain)
        for model in (replicated, other):
            update = torch.optim.Adam(model.parameters(), lr=0.01)
            for step in range(3):
                x = torch.randn(8, 7, generator=torch.Generator().manual_seed(step))
                update.zero_grad()
                model(x[rank :: place[1]]).square().mean().backward()
                update.step()
        whole = [value.full_tensor() for value in other.state_dict().values()]
        off = max(float((a - b).abs().max()) for a, b in zip(whole, plain.state_dict().values(), strict=True))
        line.send(off)


def mesh(line: Connection, place: Place) -> None:
    """Rows and columns of a mesh of 2 x 2, and a group of three ranks."""
    with grouped(place, "syncline") as rank:
        square = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
        found = []
        for name in ("data", "model"):
            total = torch.full((3000,), 10.0**rank)
            dist.all_reduce(total, group=square.get_group(name))
            found.append(float(total[0]))
        three = dist.new_group([0, 1, 3])
        if rank != 2:
            total = torch.full((3,), 10.0**rank)
            dist.all_reduce(total, group=three)
            found.append(float(total[0]))
        objects: list[Any] = [None] * place[1]
        dist.all_gather_object(objects, {"rank": rank})
        found.append([one["rank"] for one in objects])
        line.send(found)


def mismatch(line: Connection, place: Place, calls: list[str]) -> None:
    """Each rank makes the call at its place in the list."""
    with grouped(place, "syncline") as rank:
        again, _, call = calls[rank].rpartition(" ")
        if again:  # what has gone well before is kept for such calls
            for _ in range(3):
                dist.all_reduce(torch.zeros(7))
        if call == "barrier":
            dist.barrier()
        elif call == "late":
            line.recv()
            dist.barrier()
        elif call == "soon":
            sent = dist.isend(torch.zeros(1), 2 - rank)  # ranks 0 and 2 begin to wait together
            dist.recv(torch.zeros(1), 2 - rank)
            sent.wait()
            dist.barrier(timeout=timedelta(seconds=2))
        elif call == "broadcast":
            dist.broadcast(torch.zeros(4000), 0)
        elif call == "behind":
            dist.all_reduce(torch.zeros(4000), async_op=True).get_future().wait()
        elif call == "gather":
            dist.all_gather_into_tensor(torch.zeros(3 * 4000), torch.zeros(4000))
        elif call == "scatter":
            dist.reduce_scatter_tensor(torch.zeros(4000), torch.zeros(3 * 4000))
        elif call == "maximum":
            dist.all_reduce(torch.zeros(7), op=dist.ReduceOp.MAX)
        elif call == "whole":
            dist.all_reduce(torch.zeros(7, dtype=torch.int64))
        elif call == "receive":
            dist.recv(torch.zeros(3), 1 - rank)
        elif call == "send":
            dist.send(torch.zeros(4), 1 - rank)
        else:
            dist.all_reduce(torch.zeros(int(call)))
        dist.barrier()
    line.send("never")


def late(line: Connection, place: Place, how: str) -> None:
    """All but rank 2 wait for it in an allreduce."""
    with grouped(place, "syncline", timeout=timedelta(seconds=2)) as rank:
        if rank == 2:
            line.recv()
        work = dist.all_reduce(torch.zeros(3000), async_op=how != "call")
        if work is not None:
            work.get_future().wait() if how == "future" else work.wait()
    line.send("never")


def patient(line: Connection, place: Place) -> None:
    """Calls, and a group, with more time than the default group has; rank 1 comes after that."""
    with grouped(place, "syncline", timeout=timedelta(seconds=1)) as rank:
        some = dist.new_group(timeout=timedelta(seconds=60))
        if rank == 1:
            line.recv()
        dist.barrier(timeout=timedelta(seconds=60))
        if rank == 1:
            line.recv()
        dist.all_reduce(torch.zeros(3000), group=some)
    line.send("done")


def forked(line: Connection, place: Place) -> None:
    """What a forked child gets that calls collectives; its parent goes on."""
    with grouped(place, "syncline") as rank:
        for _ in range(2):
            dist.all_reduce(torch.zeros(7))
        ours, theirs = os.pipe()
        child = os.fork()
        if child == 0:
            found = []
            for call in (
                lambda: dist.all_reduce(torch.zeros(7)),
                lambda: dist.barrier(),
                lambda: dist.isend(torch.zeros(1), 1 - rank),
            ):
                try:
                    call()
                except Exception as error:
                    found.append(f"{type(error).__name__}: {error}")
            os.write(theirs, "; ".join(found).encode())
            os._exit(0)
        os.close(theirs)
        os.waitpid(child, 0)
        total = torch.ones(7)
        dist.all_reduce(total)
        with os.fdopen(ours) as pipe:
            line.send([pipe.read(), total.tolist()])


def split(line: Connection, place: Place) -> None:
    """torch splits groups of one device only, with any backend of the CPU; new_group does the same."""
    with grouped(place, "syncline") as rank:
        try:
            dist.split_group(None, [[0], [1]])
        except RuntimeError as error:
            said = str(error)
        alone = [dist.new_group([one], use_local_synchronization=True) for one in (0, 1) if one == rank]
        line.send([said, dist.get_world_size(alone[0])])


def aborts(line: Connection, place: Place) -> None:
    """Rank 1 aborts its groups while the others wait for it."""
    with grouped(place, "syncline") as rank:
        if rank == 1:
            waiting = dist.irecv(torch.zeros(3), 0)
            dist.distributed_c10d._abort_process_group()
            assert waiting is not None
            assert not waiting.is_success()
            line.send("aborted")
            line.recv()  # the others are told by what it has said, not by its end
            os._exit(0)
        dist.barrier()


def sums(line: Connection, place: Place) -> None:
    """Sums of tensors of several sizes, again and again, some behind the script: what differs from the true ones.

    The large ones, which go in many segments, are of another type in every turn.
    """
    with grouped(place, "syncline") as rank:
        world, wrong = place[1], []
        sizes = (1, 250, 5000, 300_000, 1_100_000)
        kinds = (torch.float32, torch.int64, torch.bfloat16, torch.float64)
        for turn in range(len(kinds)):
            for size in sizes:
                for kind in kinds if size < 100_000 else [kinds[turn]] if size < 1_000_000 or turn < 2 else []:
                    begun = torch.arange(size).remainder(17).to(kind)
                    tensors = [begun * (rank + 1) for _ in range(3)]
                    works = [dist.all_reduce(tensors[0], async_op=True)] if turn % 2 else []
                    dist.all_reduce(tensors[1])
                    dist.all_reduce(tensors[2], op=dist.ReduceOp.MAX)
                    whole = torch.empty(world * size, dtype=kind)
                    dist.all_gather_into_tensor(whole, begun + rank)
                    part = torch.empty(size, dtype=kind)
                    dist.reduce_scatter_tensor(part, begun.repeat(world))
                    for work in works:
                        work.wait()
                    total = begun * (world * (world + 1) // 2)
                    wanted = [total if works else begun * (rank + 1), total, begun * world]
                    gathered = torch.cat([begun + other for other in range(world)])
                    found = [*tensors, whole, part]
                    for name, one, other in zip("acmgs", found, [*wanted, gathered, begun * world], strict=True):
                        if not torch.equal(one, other):
                            wrong.append((turn, size, str(kind), name))
        line.send(wrong)


def unattended(line: Connection, place: Place) -> None:
    """Sums of one kind that go on behind the script, whose tensors nobody else keeps, among others of that kind."""
    with grouped(place, "syncline") as rank:
        found, store = [], dist.distributed_c10d._get_default_store()
        for turn in range(30):
            late = turn % place[1]  # all but this one begin before
            if rank == late:
                store.wait([f"begun {turn} {other}" for other in range(place[1]) if other != late])
            works = [dist.all_reduce(torch.full((4000,), float(rank + number)), async_op=True) for number in range(4)]
            store.set(f"begun {turn} {rank}", "")
            dist.all_reduce(torch.zeros(4000), async_op=True)
            torch.full((4000,), -1.0)  # where memory that was given back would be used again
            last = torch.full((4000,), float(rank))
            dist.all_reduce(last)
            futures = [work.get_future() for work in works[::2]]
            works[3].wait()
            found.append([float(one.wait()[0].mean()) for one in futures] + [float(last.mean())])
        line.send(found)


def loses_one(_: Connection, place: Place, use: str, fault: str, strategy: str) -> None:
    """Rank 1 is lost in the fourth step of what the others go on with for ever."""
    os.environ["SYNCLINE_STRATEGY"] = strategy
    with grouped(place, "syncline") as rank:
        step = USES[use](rank)
        for number in range(1_000_000):
            if rank == 1 and number == 3:
                lose(fault)
            step()


def lose(fault: str) -> None:
    if fault == "raises":
        raise ValueError("the data of this rank are spoilt")
    if fault == "exits":
        os._exit(3)
    os.kill(os.getpid(), signal.SIGSTOP if fault == "is stopped" else signal.SIGKILL)


def trained(model: torch.nn.Module) -> Callable[[], None]:
    update = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        update.zero_grad()
        model(torch.ones(4, 7)).square().mean().backward()
        update.step()

    return step


def replicated(hook: bool = False, **options: Any) -> Callable[[], None]:
    layers = (torch.nn.Linear(7, 64), torch.nn.Tanh(), torch.nn.Linear(64, 64))
    model = DistributedDataParallel(torch.nn.Sequential(*layers), bucket_cap_mb=0.01, **options)
    if hook:
        model.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)
    return trained(model)


def fully_sharded() -> Callable[[], None]:
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore")  # torch's own, of its own names
    return trained(fully_shard(torch.nn.Linear(7, 33), mesh=init_device_mesh("cpu", (dist.get_world_size(),))))


def distributed_tensor() -> Callable[[], None]:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    warnings.simplefilter("ignore")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))

    def step() -> None:
        whole = distribute_tensor(torch.ones(9, 5), mesh, [Shard(0)]).redistribute(mesh, [Replicate()])
        assert float(whole.to_local().sum()) == 45

    return step


def begun(then: Callable[[dist.Work], Any]) -> Callable[[int], Callable[[], None]]:
    """Every collective that goes on behind the script, and how its end is waited for."""

    def prepare(rank: int) -> Callable[[], None]:
        world = dist.get_world_size()

        def step() -> None:
            table, row = torch.zeros(world, 5000), torch.ones(5000)
            rows = list(table.unbind())
            for work in (
                dist.all_reduce(torch.ones(500_000), async_op=True),
                dist.broadcast(row, 0, async_op=True),
                dist.all_gather(rows, row, async_op=True),
                dist.all_gather_into_tensor(table, row, async_op=True),
                dist.reduce(row, 0, async_op=True),
                dist.reduce_scatter_tensor(row, table, async_op=True),
                dist.all_to_all_single(table, torch.ones_like(table), async_op=True),
                dist.gather(row, rows if rank == 0 else None, 0, async_op=True),
                dist.scatter(row, rows if rank == 0 else None, 0, async_op=True),
                dist.barrier(async_op=True),
            ):
                then(work)

        return step

    return prepare


def called_back(work: dist.Work) -> None:
    """A callback that takes the value, as hooks of DistributedDataParallel do."""
    work.get_future().then(lambda future: future.value()).wait()


USES: dict[str, Callable[[int], Callable[[], None]]] = {
    "all_reduce": lambda _: lambda: dist.all_reduce(torch.zeros(1000)),
    "DDP": lambda _: replicated(),
    "DDP static graph": lambda _: replicated(static_graph=True, gradient_as_bucket_view=True),
    "DDP unused": lambda _: replicated(find_unused_parameters=True),
    "DDP hook": lambda _: replicated(hook=True),
    "FSDP2": lambda _: fully_sharded(),
    "DTensor": lambda _: distributed_tensor(),
    "works": begun(lambda work: work.wait()),
    "futures": begun(lambda work: work.get_future().wait()),
    "callbacks": begun(called_back),
}
"""What a step is, by what of torch is used in it; each is called with the rank and gives one step."""


def makes_groups_again(line: Connection, place: Place, strategy: str) -> None:
    """The numbers of groups that are destroyed at once, of one in between, and of the one after a message in it."""
    os.environ["SYNCLINE_STRATEGY"] = strategy

    def one_more(turn: int, rank: int) -> Any:
        made = dist.new_group([0, 1])
        if rank < 2:
            for size in (3, 1000 + turn, 70_000):
                tensor = torch.full((size,), float(turn + rank))
                works = [dist.all_reduce(tensor, group=made, async_op=True)] if turn % 2 else []
                for work in works:
                    work.wait()
                if not turn % 2:
                    dist.all_reduce(tensor, group=made)
                assert (tensor == 2 * turn + 1).all()
            got = [torch.zeros(2) for _ in range(2)]
            dist.all_gather(got, torch.full((2,), float(rank + turn)), group=made)
            assert [float(one[0]) for one in got] == [turn, turn + 1]
        return made

    with grouped(place, "syncline") as rank:
        numbers = set()
        for turn in range(30):
            made = one_more(turn, rank)
            if rank < 2:
                numbers.add(made.us.number)
                dist.destroy_process_group(made)
        kept, spoken = one_more(30, rank), one_more(31, rank)
        between = 0
        if rank < 2:
            numbers.add(kept.us.number)
            between = spoken.us.number
            if rank == 0:
                dist.send(torch.ones(1), 1, group=spoken)
            else:
                dist.recv(torch.zeros(1), 0, group=spoken)
            dist.destroy_process_group(spoken)
        last = one_more(32, rank)
        line.send((numbers, between, last.us.number if rank < 2 else 0))


def goes_without_a_word(line: Connection, place: Place) -> None:
    """Scripts need not destroy their groups, and do not end together."""
    rank, world, address = place
    host, _, port = address.rpartition(":")
    os.environ.update(MASTER_ADDR=host, MASTER_PORT=port, SYNCLINE_SECRET=SECRET)
    dist.init_process_group("syncline", rank=rank, world_size=world)
    dist.barrier()
    line.send("done")
    if rank == 0:
        line.recv()


def refused(line: Connection, place: Place) -> None:
    """What is not there, and what was made for a device beside this one."""
    made: list[Any] = []

    class StandIn(dist.ProcessGroup):
        def allreduce(self, tensors: Any, *_: Any) -> Any:
            made.append(tensors[0].device.type)
            future: Any = torch.futures.Future()
            future.set_result(tensors)
            return torch._C._distributed_c10d._create_work_from_future(future)

        def shutdown(self) -> None:
            made.append("shut down")

    dist.Backend.register_backend("standin", lambda _store, rank, size, _timeout: StandIn(rank, size), devices=["meta"])
    with grouped(place, "cpu:syncline,meta:standin"):
        total = torch.ones(3)
        dist.all_reduce(total)
        dist.all_reduce(torch.ones(3, device="meta"))
        found = [total.tolist(), list(made)]
        some = dist.new_group(list(range(place[1])), backend="syncline")
        for call in (
            lambda: dist.all_reduce(torch.ones(3, device="meta"), group=some),
            lambda: dist.all_reduce(torch.ones(3), op=dist.ReduceOp.BAND),
            lambda: dist.new_group(list(range(place[1])), backend="syncline", pg_options="ps(servers=1)"),
            lambda: dist.new_group(list(range(place[1])), backend="syncline", pg_options="codec=int8"),
        ):
            try:
                call()
            except (NotImplementedError, ValueError) as error:
                found.append(f"{type(error).__name__}: {error}")
        other = dist.new_group(list(range(place[1])), backend="syncline", pg_options="tree transport=tcp")
        total = torch.ones(3000)
        dist.all_reduce(total, group=other)
        found += [float(total[0]), other.us.strategy.transport.name]
    line.send([*found, made[1:]])


def hooked(line: Connection, place: Place, backend: str, codec: str) -> None:
    """Weights under the hook, on all ranks alike; and those of a run that was resumed in the middle, twice."""
    small = mock.patch.object(owners, "PIECE_BYTES", 1500)  # so that messages of several pieces are under way
    with grouped(place, backend) as rank, small:

        def begin() -> tuple[Any, Any]:
            model = DistributedDataParallel(build(0), bucket_cap_mb=0.03)
            state = syncline.hook_state(codec)
            model.register_comm_hook(state, syncline.comm_hook)
            return model, state

        def digest(model: Any) -> list[Any]:
            return [tensor.numpy() for tensor in weights(model.module)]

        model, state = begin()
        train(model, rank, place[1], 5)
        saved, kept = weights(model.module), state.state_dict()
        found = [digest(model)]
        for _ in range(2):
            model, state = begin()
            model.module.load_state_dict(dict(zip(model.module.state_dict(), saved, strict=True)))
            state.load_state_dict(kept)
            train(model, rank, place[1], 3, first=5)
            found.append(digest(model))
        line.send([*found, sum(one.numel() for one in kept["ranks"])])


def hooked_out_of_step(line: Connection, place: Place) -> None:
    """The weights under the hook where rank 1's first bucket only begins when its second one is done."""
    with grouped(place, "gloo") as rank:
        second, reduce = threading.Event(), CompressedBucket.reduce
        begun: list[int] = []

        def held(bucket: Any, buffer: torch.Tensor, carrier: Any) -> None:
            if bucket.index == 0 and not second.wait(60):
                raise AssertionError("the second bucket waits for the first")
            begun.append(bucket.index)
            reduce(bucket, buffer, carrier)
            if bucket.index == 1:
                second.set()

        model = DistributedDataParallel(build(0), bucket_cap_mb=0.003)
        model.register_comm_hook(syncline.hook_state("codec=int8"), syncline.comm_hook)
        with mock.patch.object(CompressedBucket, "reduce", held if rank == 1 else reduce):
            train(model, rank, place[1], 2)  # the first step is sent as it is
        line.send([begun, [tensor.numpy() for tensor in weights(model.module)]])


def hook_fails(line: Connection, place: Place) -> None:
    """What each rank is told where rank 1 cannot reduce its second bucket."""
    with grouped(place, "gloo", timeout=timedelta(seconds=4)) as rank:
        reduce = CompressedBucket.reduce

        def fails(bucket: Any, buffer: torch.Tensor, carrier: Any) -> None:
            if bucket.index == 1:
                raise RuntimeError("no memory left")
            reduce(bucket, buffer, carrier)

        model = DistributedDataParallel(build(0), bucket_cap_mb=0.003)
        state = syncline.hook_state("codec=int8")
        model.register_comm_hook(state, syncline.comm_hook)
        said = ""
        with mock.patch.object(CompressedBucket, "reduce", fails if rank == 1 else reduce):
            try:
                train(model, rank, place[1], 2)
            except RuntimeError as error:
                said = str(error)
        line.send([said, repr(state._failed)])
