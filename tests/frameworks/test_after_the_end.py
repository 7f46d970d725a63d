"""Models and optimizers outlive a run, and have copies and pickles: these are plain, and the run may come again."""

from __future__ import annotations

import copy
import io
import pickle
import threading
from collections.abc import Callable
from functools import partial
from itertools import cycle, pairwise
from typing import Any

import pytest
import torch
from toy import (
    SERVED,
    STRATEGIES,
    Here,
    alone,
    batch,
    close,
    loss_of,
    making,
    mlp,
    on_group,
    same_as_alone,
    same_state,
    train,
    weights,
)

from syncline.errors import UsageError
from syncline.frameworks.torch import choosing, prepare
from syncline.schedules.merged import Merged
from syncline.session.session import Session

MOMENTS = (0, choosing._UNCOUNTED, Merged.measures, choosing._UNCOUNTED + choosing._MEASURED)
"""Steps before which a model is copied: the first, and where a schedule that measures begins to, or has chosen."""


def saved_and_loaded(model: torch.nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(model, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=False)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda value: pickle.loads(pickle.dumps(value)),
    "torch.save": saved_and_loaded,
}


@pytest.mark.parametrize(
    ("strategy", "how"),
    [
        *zip(
            [
                "ring",
                "ps(servers=1)",
                *(f"ring schedule={word}" for word in ("auto", "merged", "split", "priority", "delayed")),
            ],
            cycle(COPIES),
        )
    ],
)
def test_a_copy_of_a_prepared_model_is_plain(group: Any, strategy: str, how: str) -> None:
    """Whatever is timed: it has the user's own hooks and none of ours, and its passes are no passes of the original."""
    seen: list[object] = []

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model, optimizer = making("sgd")(index)
        if how == "deepcopy":
            model.register_forward_hook(lambda *_: seen.append(1))
        return model, optimizer

    def body(here: Here) -> None:
        assert here.replica is not None
        for first, last in pairwise((*MOMENTS, MOMENTS[-1] + 1)):
            twin = COPIES[how](here.model)
            check_plain(twin, how)
            close(weights(twin), weights(here.model), 0)
            steps = here.replica.steps
            loss_of(twin(batch(7, 5 + here.rank))).backward()
            loss_of(mlp().train()(batch(7))).backward()
            assert here.replica.steps == steps
            assert twin[0].weight.grad.data_ptr() != here.replica.storage.views[0].data_ptr()
            check_plain(COPIES[how](torch.nn.ModuleDict({"inner": here.model}))["inner"], how)
            train(here, range(first, last))

    on_group(group, strategy, 2, make, body)


def check_plain(twin: Any, how: str) -> None:
    assert len(twin._forward_hooks) == (how == "deepcopy")
    twin._forward_hooks.clear()
    for module, plain in zip(twin.modules(), mlp().modules(), strict=True):
        assert type(module) is type(plain)
        assert vars(module).keys() == vars(plain).keys()
        assert not any(value for key, value in vars(module).items() if key.endswith("_hooks"))
    for parameter in twin.parameters():
        assert type(parameter) is torch.nn.Parameter
        assert not parameter._post_accumulate_grad_hooks
        assert not parameter._backward_hooks


class SaysItself(torch.nn.Module):
    """What modules of other people do about copies and pickles; the base has layers, and knows a hook that knows it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = mlp()
        self.settings = {"zero_grad": True}
        self.same = self.settings
        self.register_forward_hook(partial(_counted, self))

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)


def _counted(module: SaysItself | None, *_: object) -> None:
    if module is not None:
        module.settings["passes"] = module.settings.get("passes", 0) + 1


class Reduced(SaysItself):
    """What is given to a function cannot refer to what it makes, so its hook does not know it."""

    def __init__(self) -> None:
        super().__init__()
        self._forward_hooks.clear()
        self.register_forward_hook(partial(_counted, None))

    def __reduce__(self) -> Any:
        return _made, (type(self), self.__dict__)


class Stated(SaysItself):
    def __getstate__(self) -> Any:
        return "version 2", {"attributes": dict(vars(self))}

    def __setstate__(self, state: Any) -> None:
        vars(self).update(state[1]["attributes"])


class CopiedDeep(SaysItself):
    def __deepcopy__(self, memo: Any) -> Any:
        made = type(self).__new__(type(self))
        memo[id(self)] = made
        vars(made).update({key: copy.deepcopy(value, memo) for key, value in vars(self).items()})
        return made


class CopiedFlat(SaysItself):
    def __deepcopy__(self, memo: Any) -> Any:
        made = _made(type(self), dict(vars(self)))
        vars(made)["_modules"] = copy.deepcopy(self._modules, memo)
        made.settings = made.same = copy.deepcopy(self.settings, memo)
        made._forward_hooks = copy.deepcopy(self._forward_hooks, memo)
        return made


class Nested(torch.nn.Module):
    """The class that says it is a part of the model."""

    def __init__(self, part: torch.nn.Module) -> None:
        super().__init__()
        self.part = part

    def forward(self, x: torch.Tensor) -> Any:
        return self.part(x)


def _made(kind: type, attributes: dict[str, Any]) -> Any:
    made = kind.__new__(kind)
    vars(made).update(attributes)
    return made


SAYING: dict[str, Callable[[], torch.nn.Module]] = {
    "torch.fx": lambda: torch.fx.symbolic_trace(mlp()),
    "part of torch.fx": lambda: Nested(torch.fx.symbolic_trace(mlp())),
    **{kind.__name__: kind for kind in (Reduced, Stated, CopiedDeep, CopiedFlat)},
    **{f"part of {kind.__name__}": lambda kind=kind: Nested(kind()) for kind in (Reduced, Stated, CopiedDeep)},
}


TRACING = threading.Lock()
"""torch.fx traces for one thread at a time."""


TOLD = [
    *((kind, how) for kind in SAYING for how in (["deepcopy"] if "part" in kind else ["deepcopy", "pickle"])),
    *(("part of Stated", how) for how in ("pickle", "torch.save", "copy")),
    *((kind, "copy") for kind in ("torch.fx", "Reduced", "CopiedFlat")),
]


@pytest.mark.every(3)
@pytest.mark.parametrize(
    ("kind", "how", "schedule"), [(*case, schedule) for case, schedule in zip(TOLD, cycle(("auto", "priority")))]
)
def test_a_copy_of_a_model_whose_class_says_how_it_is_copied_is_plain(
    group: Any, kind: str, how: str, schedule: str
) -> None:
    """In the steps that are timed and behind them; what else its attributes are, and the user's own hooks, stay."""
    copied = COPIES.get(how, copy.copy)

    def make(index: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:  # noqa: ARG001
        with TRACING:
            model = SAYING[kind]()
        return model, torch.optim.SGD(model.parameters(), lr=0.1)

    def check(here: Here) -> None:
        assert here.replica is not None
        bare, twin = SAYING[kind](), copied(here.model)
        close(weights(twin), weights(here.model), 0)
        for module, other in zip(twin.modules(), bare.modules(), strict=True):
            if how != "copy" or module is twin:
                assert vars(module).keys() == vars(copied(other)).keys()
                for name, value in vars(module).items():
                    if name.endswith("_hooks"):
                        assert len(value) == len(vars(copied(other))[name]), (type(module), name)
            if isinstance(module, SaysItself):
                assert module.settings is module.same
                assert module.settings["zero_grad"]
                if how == "deepcopy" and not isinstance(module, Reduced):
                    (hook,) = module._forward_hooks.values()
                    assert hook.args[0] is module  # type: ignore[attr-defined]
        if how != "copy":
            steps = here.replica.steps
            loss_of(twin(batch(7, 5 + here.rank))).backward()
            assert here.replica.steps == steps

    def body(here: Here) -> None:
        assert here.session is not None
        for first, last in pairwise((*MOMENTS, MOMENTS[-1] + 1)):
            here.session.barrier()  # torch.fx traces, and unpickles, for one thread at a time
            if here.rank == 0 or "torch.fx" not in kind:
                check(here)
            if here.rank == 0 and "torch.fx" in kind:
                assert torch.fx.symbolic_trace(here.model)(batch(1)).shape == (12, 3)
            here.session.barrier()
            train(here, range(first, last))

    on_group(group, f"ring schedule={schedule}", 2, make, body)


def test_an_average_of_the_weights_follows_the_model(group: Any) -> None:
    def body(here: Here) -> dict[str, torch.Tensor]:
        average = torch.optim.swa_utils.AveragedModel(
            here.model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for step in range(3):
            train(here, range(step, step + 1))
            average.update_parameters(here.model)
            average(batch(step))
        return weights(average.module)

    for strategy in ("ring", "ps(servers=2)"):
        same_as_alone(group, strategy, 2, making("momentum"), body)


@pytest.mark.parametrize(("strategy", "how"), [*zip(STRATEGIES, cycle(["deepcopy", "pickle", "torch.save"]))])
def test_a_copy_of_an_optimizer_is_plain_and_has_the_whole_state(group: Any, strategy: str, how: str) -> None:
    def body(here: Here) -> dict[str, Any]:
        train(here, range(2))
        twin = COPIES[how](here.optimizer)
        assert type(twin) is torch.optim.Adam
        train(here, range(2, 3))
        return copy.deepcopy(twin.state_dict())

    def plain(here: Here) -> dict[str, Any]:
        train(here, range(2))
        return copy.deepcopy(here.optimizer.state_dict())

    wanted = alone(making("adam"), plain)
    for found in on_group(group, strategy, 2, making("adam"), body):
        same_state(found, wanted)


@pytest.mark.parametrize("strategy", SERVED)
def test_the_state_is_not_read_where_it_is_not(group: Any, strategy: str) -> None:
    def body(here: Here) -> None:
        train(here, range(1))
        parameter = next(here.model.parameters())
        for use in (
            lambda: here.optimizer.state[parameter],
            lambda: here.optimizer.state.clear(),
            lambda: setattr(here.optimizer, "state", {}),
        ):
            with pytest.raises(UsageError, match=r"optimizer.state_dict\(\)\['state'\]"):
                use()

    on_group(group, strategy, 2, making("adam"), body)


class Kept:
    """A model and an optimizer on every rank, and two runs with them."""

    def __init__(self, make: Any, ranks: int) -> None:
        self.made = [make(rank) for rank in range(ranks)]

    def run(self, group: Any, strategy: str, workers: int, steps: range, fetch: bool = True) -> list[Any]:
        """Prepare, train, and let go as ``shutdown`` does."""

        def body(session: Session) -> dict[str, torch.Tensor] | None:
            made = prepare(session, *self.made[session.index])
            if made is None:
                return None
            here = Here(made.model, made.optimizer, session.rank, session.world_size)
            train(here, steps)
            made.release(fetch)
            return weights(made.model)

        return group(strategy, workers, body)[:workers]  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("first", "second"),
    [
        *zip(
            ["ring", "ps(servers=2)", "ps(servers=1, on=workers)", "ps(servers=2, on=workers)"],
            cycle(["ring", "ps(servers=1)", "ps(servers=2, on=workers)"]),
        )
    ],
)
def test_a_run_after_a_run_goes_on_with_the_same_model_and_optimizer(group: Any, first: str, second: str) -> None:
    """The scheduler, made before, is that of one worker; servers of the second run take rank 0's state."""
    kept = Kept(making("adam"), 4)
    schedulers = [torch.optim.lr_scheduler.StepLR(optimizer, 1) for _, optimizer in kept.made]
    kept.run(group, first, 2, range(3))
    for scheduler in schedulers[:2]:
        scheduler.step()
    found = kept.run(group, second, 2, range(3, 5))

    def at_once(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(3))
        here.optimizer.param_groups[0]["lr"] *= 0.1
        train(here, range(3, 5))
        return weights(here.model)

    wanted = alone(making("adam"), at_once)
    for one in found:
        close(one, wanted)


def test_an_optimizer_whose_servers_have_gone_trains_on_alone(group: Any) -> None:
    kept = Kept(making("adam"), 3)
    kept.run(group, "ps(servers=1)", 2, range(3))

    def at_once(here: Here) -> dict[str, torch.Tensor]:
        train(here, range(5))
        return weights(here.model)

    for model, optimizer in kept.made[:2]:
        train(Here(model, optimizer), range(3, 5))
        close(weights(model), alone(making("adam"), at_once))


@pytest.mark.parametrize("strategy", ["ps(servers=1)", "ps(servers=2, on=workers)"])
def test_an_optimizer_whose_state_is_gone_says_so_until_it_gets_one(group: Any, strategy: str) -> None:
    kept = Kept(making("adam"), 3)
    kept.run(group, strategy, 2, range(2), fetch=False)
    _, optimizer = kept.made[0]
    for use in (optimizer.step, optimizer.state_dict, lambda: optimizer.state, lambda: copy.deepcopy(optimizer)):
        with pytest.raises(UsageError, match=r"stayed with the owners.*before syncline.shutdown\(\)"):
            use()

    def state(here: Here) -> dict[str, Any]:
        train(here, range(2))
        return copy.deepcopy(here.optimizer.state_dict())

    wanted = alone(making("adam"), state)
    optimizer.load_state_dict(wanted)
    assert type(optimizer) is torch.optim.Adam
    same_state(optimizer.state_dict(), wanted)


def test_an_optimizer_without_state_is_plain_after_any_run(group: Any) -> None:
    kept = Kept(making("sgd"), 2)
    kept.run(group, "ps(servers=1, on=workers)", 2, range(2), fetch=False)
    assert [type(optimizer) for _, optimizer in kept.made] == [torch.optim.SGD] * 2


def test_an_owner_that_is_missing_in_the_next_run_is_an_error(group: Any) -> None:
    kept = Kept(making("adam"), 3)
    kept.run(group, "ps(servers=3, on=workers)", 3, range(2))
    with pytest.raises(UsageError, match="stayed with the owners"):
        kept.run(group, "ring", 2, range(2))
