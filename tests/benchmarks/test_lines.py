"""``benchmarks/lines`` trains the same model under every contender, and says what went wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")


@pytest.mark.beyond(2)
@pytest.mark.parametrize("contender", ["lines", "alone", "gloo", "backend"])
def test_a_contender_trains(contender: str, program: Callable[[str], ModuleType]) -> None:
    lines = program("lines")
    assert contender in lines.CONTENDERS
    assert 0.1 < lines.measured("linear", contender, False, lines.TREE, 0.1) < 1000


@pytest.mark.slow
def test_a_contender_that_fails_is_named_with_its_error(program: Callable[[str], ModuleType], tmp_path: Path) -> None:
    (tmp_path / "src" / "syncline").mkdir(parents=True)
    (tmp_path / "src" / "syncline" / "__init__.py").write_text("raise ImportError('this tree is broken')")
    with pytest.raises(SystemExit, match=r"(?s)^lines could not train linear:.*this tree is broken"):
        program("lines").measured("linear", "lines", False, tmp_path, 0.1)


@pytest.mark.parametrize(("name", "parameters", "tensors"), [("resnet18", 11_181_642, 62), ("cnn", 1_199_882, 8)])
def test_models_are_as_large_as_documented(
    name: str, parameters: int, tensors: int, program: Callable[[str], ModuleType]
) -> None:
    model, _ = program("lines").MODELS[name]()
    assert sum(each.numel() for each in model.parameters()) == parameters
    assert len(list(model.parameters())) == tensors
