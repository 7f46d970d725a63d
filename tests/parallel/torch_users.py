"""What else of torch communicates by a group, each beside the same without it: how far off the numbers are."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from backend_bodies import grouped
from rank_bodies import Place
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

STEPS = 3


def users(line: Connection, place: Place) -> None:
    """All of them in one run of two ranks or more."""
    with grouped(place, "syncline") as rank, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own
        line.send({case.__name__: case(rank, place[1]) for case in CASES})


def network() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4))


def train(model: Any, optimizer: torch.optim.Optimizer, rank: int, clip: Callable[[], object] = lambda: None) -> None:
    torch.manual_seed(rank)
    for _ in range(STEPS):
        optimizer.zero_grad()
        model(torch.randn(5, 8)).square().mean().backward()
        clip()
        optimizer.step()


def replicated(rank: int, kind: Callable[..., torch.optim.Optimizer], clipped: bool = False) -> list[torch.Tensor]:
    """What DistributedDataParallel makes of the network."""
    model = DistributedDataParallel(network())
    parameters = list(model.parameters())
    clip = (lambda: torch.nn.utils.clip_grad_norm_(parameters, 0.1)) if clipped else (lambda: None)
    train(model, kind(parameters, lr=0.01), rank, clip)
    return [parameter.detach() for parameter in parameters]


def off(found: Any, wanted: Any) -> float:
    return max(float((one - other).abs().max()) for one, other in zip(found, wanted, strict=True))


def fully_sharded_by_the_older_class(rank: int, world: int) -> float:  # noqa: ARG001
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    wanted, found = replicated(rank, torch.optim.SGD, clipped=True), []
    for strategy in ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD:
        model = FullyShardedDataParallel(network(), sharding_strategy=strategy, device_id=torch.device("cpu"))
        train(model, torch.optim.SGD(model.parameters(), lr=0.01), rank, lambda model=model: model.clip_grad_norm_(0.1))
        with FullyShardedDataParallel.summon_full_params(model):
            found.append(off([part.detach() for part in model.parameters()], wanted))
    return max(found)


def compiled_model(rank: int, world: int) -> float:  # noqa: ARG001
    plain = DistributedDataParallel(network())
    other = DistributedDataParallel(network())
    for model, call in (plain, plain), (other, torch.compile(other, backend="aot_eager")):
        train(call, torch.optim.SGD(model.parameters(), lr=0.1), rank)
    return off(other.parameters(), plain.parameters())


def collectives_in_a_compiled_function(rank: int, world: int) -> float:
    @torch.compile(backend="aot_eager", fullgraph=True)
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        doubled = x * 2
        dist.all_reduce(doubled)
        every, part = x.new_empty(world * x.numel()), x.new_empty(x.numel() // world)
        dist.all_gather_into_tensor(every, x)
        dist.reduce_scatter_tensor(part, doubled)
        return doubled + 1, every, part

    x = [torch.arange(6.0) + one for one in range(world)]
    total = 2 * sum(x, torch.zeros(6))
    return off(call(x[rank]), (total + 1, torch.cat(x), world * total.chunk(world)[rank]))


def sharded_optimizer(rank: int, world: int) -> float:  # noqa: ARG001
    from torch.distributed.optim import ZeroRedundancyOptimizer

    def kind(parameters: Any, lr: float) -> Any:
        return ZeroRedundancyOptimizer(parameters, optimizer_class=torch.optim.Adam, lr=lr)

    return off(replicated(rank, kind), replicated(rank, torch.optim.Adam))


def compressing_hooks(rank: int, world: int) -> float:
    """Beside a group of Gloo's in the same run."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    gloo = dist.new_group(list(range(world)), backend="gloo")
    found = []
    for group in (None, gloo):
        model = DistributedDataParallel(network(), process_group=group)
        state = powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        half = DistributedDataParallel(network(), process_group=group)
        half.register_comm_hook(group, default_hooks.fp16_compress_hook)
        for one in model, half:
            train(one, torch.optim.SGD(one.parameters(), lr=0.01), rank)
        found.append([part.detach() for one in (model, half) for part in one.parameters()])
    return off(*found)


def pipeline_of_stages(rank: int, world: int) -> float:
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return (output - target).square().mean()

    torch.manual_seed(0)
    layers = [torch.nn.Linear(8, 8) for _ in range(world)]
    x, target, micro = torch.randn(8, 8), torch.randn(8, 8), 4
    whole = torch.nn.Sequential(*copy.deepcopy(layers))
    for part, wanted in zip(x.chunk(micro), target.chunk(micro), strict=True):
        (loss(whole(part), wanted) / micro).backward()
    found = []
    for kind in ScheduleGPipe, Schedule1F1B:
        mine = copy.deepcopy(layers[rank])
        schedule = kind(PipelineStage(mine, rank, world, torch.device("cpu")), micro, loss_fn=loss)
        given = (x,) if rank == 0 else ()
        schedule.step(*given, target=target, losses=[]) if rank == world - 1 else schedule.step(*given)
        found.append(off([one.grad for one in mine.parameters()], [one.grad for one in whole[rank].parameters()]))
    return max(found)


def checkpoint_behind_the_training(rank: int, world: int) -> float:
    import torch.distributed.checkpoint as saving
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
    from torch.distributed.fsdp import fully_shard

    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    train(model, torch.optim.Adam(model.parameters(), lr=0.01), rank)
    before = [part.to_local().detach().clone() for part in model.parameters()]
    with tempfile.TemporaryDirectory() as folder:
        place = [folder if rank == 0 else None]
        dist.broadcast_object_list(place)
        saving.async_save(get_model_state_dict(model), checkpoint_id=place[0]).result()
        with torch.no_grad():
            for part in model.parameters():
                part.zero_()
        state = get_model_state_dict(model)
        saving.load(state, checkpoint_id=place[0])
        set_model_state_dict(model, state)
        dist.barrier()  # rank 0 removes the folder
    return off([part.to_local().detach() for part in model.parameters()], before)


CASES = [
    fully_sharded_by_the_older_class,
    sharded_optimizer,
    compressing_hooks,
    pipeline_of_stages,
    checkpoint_behind_the_training,
    compiled_model,
    collectives_in_a_compiled_function,
]
