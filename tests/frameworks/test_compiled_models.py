"""What torch.compile leaves alone, also where torch's private names for that are others."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from syncline.frameworks.torch.compiled import eager, eager_methods


def refuse(*_: object) -> None:
    raise TypeError("takes other arguments")


@pytest.mark.parametrize(
    "names",
    [
        {"set_code_exec_strategy": refuse},
        {
            "set_code_exec_strategy": refuse,
            "_FrameAction": SimpleNamespace(SKIP=1),
            "_FrameExecStrategy": SimpleNamespace,
        },
        {"set_code_exec_strategy": refuse, "_FrameAction": SimpleNamespace(SKIP=1), "_FrameExecStrategy": lambda *_: 1},
        {"skip_code": refuse},
        {},
    ],
)
def test_a_torch_with_other_private_names_is_no_error(monkeypatch: pytest.MonkeyPatch, names: dict[str, Any]) -> None:
    monkeypatch.setattr(torch._C._dynamo, "eval_frame", SimpleNamespace(**names))

    @eager_methods
    class Counter:
        def after(self, number: int) -> int:
            return number + 1

    assert Counter().after(1) == 2
    assert eager(len)([1, 2]) == 2


def test_this_torch_is_told_to_pass_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []
    evaluation = torch._C._dynamo.eval_frame
    name = "set_code_exec_strategy" if hasattr(evaluation, "set_code_exec_strategy") else "skip_code"
    kept: Any = vars(evaluation)
    instead = SimpleNamespace(**{**kept, name: lambda code, *_: told.append(code)})
    monkeypatch.setattr(torch._C._dynamo, "eval_frame", instead)
    outside: Any = eager(len)
    assert told == [outside.__code__]
