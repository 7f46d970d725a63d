"""Write your own allreduce algorithm, a function from a group to a plan; then check, draw and train with it.

    python examples/own_algorithm.py

The four workers are threads of this process, so no launcher is needed.
"""

import threading

import torch

from syncline.errors import PlanError
from syncline.frameworks.torch import prepare
from syncline.launch.connecting import in_process
from syncline.nouns import Group
from syncline.plans import COPY, REDUCE, Plan, check
from syncline.registry import register
from syncline.session.session import Session
from syncline_bench.report.plan_drawing import draw_plan

WORKERS, STEPS = 4, 20


@register("algorithms", "star", goal="allreduce")
def star(group: Group) -> Plan:
    """Allreduce through rank 0: all ranks send their arrays to it, and it sends the sum back.

    Cost: 2(N-1)(a + nb) + (N-1)ng, all of it at the port of rank 0.
    """
    others = range(1, group.workers)
    # Columns: step, source, destination, first chunk, number of chunks, operation.
    gather = [(0, rank, 0, 0, 1, REDUCE) for rank in others]
    spread = [(1, 0, rank, 0, 1, COPY) for rank in others]
    return Plan.of("star", group, 1, gather + spread)


def train(session: Session | None) -> torch.Tensor:
    """Train for some steps and return the weights. Without a session, train on all data, else on this rank's share."""
    rank, world = (0, 1) if session is None else (session.rank, session.world_size)
    generator = torch.Generator().manual_seed(0)  # the same data on every rank
    model = torch.nn.Linear(10, 1, bias=False).double()
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    if session is not None:
        prepare(session, model, optimizer)
    for _ in range(STEPS):
        x = torch.randn(32, 10, generator=generator).double()
        mine = x[rank::world]
        optimizer.zero_grad()
        (model(mine) - mine[:, :1]).square().mean().backward()
        optimizer.step()
    return model.weight.detach()


def main() -> None:
    plan = star(Group(WORKERS))
    check(plan)
    print(draw_plan(plan))
    try:
        check(Plan.of("star without its last row", WORKERS, 1, plan.rows[:-1]))
    except PlanError as error:
        print(f"\nrefused: {error}")

    weights: dict[int, torch.Tensor] = {}

    def work(session: Session) -> None:
        weights[session.rank] = train(session)
        session.shutdown()

    threads = [threading.Thread(target=work, args=(session,)) for session in in_process("star", WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    apart = max((weights[rank] - train(None)).abs().max().item() for rank in range(WORKERS))
    print(f"\n{STEPS} steps on {WORKERS} workers and on one differ by at most {apart:.1e}")


if __name__ == "__main__":
    main()
