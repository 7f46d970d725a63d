"""Data parallelism with pipeline parallelism: two stages, each on two workers that average their gradients.

    syncline run -n 4 examples/pipeline_by_data.py
    syncline run -n 4 --strategy "ring schedule=wait_free" examples/pipeline_by_data.py
    torchrun --nproc-per-node 4 examples/pipeline_by_data.py

A DeviceMesh defines the groups. ``torch.distributed`` sends activations and their gradients between the stages, one
micro-batch at a time. After the backward pass of the last micro-batch, Syncline averages the gradients of each stage
over the mesh dimension ``data``. At the end the script compares the weights with those of one process that trains both
stages on all samples.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import syncline

STAGES, REPLICAS, PIECES = 2, 2, 2
STEPS, BATCH = 20, 32


def stages() -> list[torch.nn.Module]:
    """Both stages, with the same initial weights on all ranks."""
    torch.manual_seed(0)
    first = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32), torch.nn.Tanh())
    return [first.double(), torch.nn.Linear(32, 4).double()]


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.randn(BATCH, 12, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return made[:, :8], made[:, 8:]


def main() -> None:
    torch.set_num_threads(1)
    syncline.init()
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (STAGES, REPLICAS), mesh_dim_names=("stage", "data"))
    stage, replica = mesh.get_local_rank("stage"), mesh.get_local_rank("data")
    model = stages()[stage]
    model, optimizer = syncline.prepare(model, sgd(model), group=mesh["data"])
    neighbour = int(mesh.mesh[1 - stage, replica])

    for step in range(STEPS):
        optimizer.zero_grad()
        pieces = [part.chunk(REPLICAS)[replica].chunk(PIECES) for part in batch(step)]
        if stage == 0:
            send_forward(model, pieces[0], neighbour)
        else:
            learn(model, pieces[1], neighbour)
        optimizer.step()

    differences = syncline.gather(str(difference(model, stage)).encode())
    if syncline.rank() == 0:
        print(f"{syncline.stats(group=mesh['data']).strategy}: {STAGES} stages x {REPLICAS} replicas")
        print(f"largest difference from one process: {max(map(float, differences)):.1e}")
    dist.destroy_process_group()


def send_forward(model: torch.nn.Module, pieces: tuple[torch.Tensor, ...], behind: int) -> None:
    """Run the first stage: forward for all micro-batches, then backward for each when its gradient arrives."""
    outputs = [model(piece) for piece in pieces]
    sent = [dist.isend(output.detach(), behind) for output in outputs]
    for number, output in enumerate(outputs):
        gradient = torch.empty_like(output)
        dist.recv(gradient, behind)
        if number < PIECES - 1:
            with syncline.no_sync():
                output.backward(gradient)
        else:
            output.backward(gradient)  # the last one averages the gradients of all micro-batches over the replicas
    for work in sent:
        work.wait()


def learn(model: torch.nn.Module, wanted: tuple[torch.Tensor, ...], before: int) -> None:
    """Run the last stage: for each micro-batch that arrives, run forward and backward and send the gradient back."""
    sent = []
    for number, target in enumerate(wanted):
        given = torch.empty(len(target), 32, dtype=torch.float64)
        dist.recv(given, before)
        loss = torch.nn.functional.mse_loss(model(given.requires_grad_()), target) / PIECES
        if number < PIECES - 1:
            with syncline.no_sync():
                loss.backward()
        else:
            loss.backward()
        sent.append(dist.isend(given.grad, before))
    for work in sent:
        work.wait()


def difference(model: torch.nn.Module, stage: int) -> float:
    """The largest difference between the weights of this stage and those that one process has trained."""
    both = torch.nn.Sequential(*stages())
    optimizer = sgd(both)
    for step in range(STEPS):
        x, wanted = batch(step)
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(both(x), wanted).backward()
        optimizer.step()
    pairs = zip(model.parameters(), both[stage].parameters(), strict=True)
    return max(float((mine - other).detach().abs().max()) for mine, other in pairs)


if __name__ == "__main__":
    main()
