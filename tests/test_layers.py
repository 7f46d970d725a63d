"""Imports point one way: every file may know only what stands below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import syncline

ROOT = Path(next(iter(syncline.__path__)))

# From the bottom up. What stands in one row does not know each other; a row is extended, or a new one put in between,
# with the module or folder that is added.
LAYERS = (
    ("errors", "version"),
    ("types", "kernels"),
    ("plan", "registry", "wire", "grammar"),
    ("algorithms", "collectives", "codecs", "schedules", "sync", "transports", "predict", "predict.network"),
    ("program", "parts", "script", "choice"),
    ("onesided", "words"),
    ("combining",),
    ("strategy", "reducers"),
    ("exchange",),
    ("reducing", "stall", "work"),
    ("engine", "predict.simulate"),
    ("tickets", "compression", "ending", "statistics"),
    ("updates",),
    ("session",),
    ("tuning", "launch"),
    ("connecting",),
    ("frameworks", "workloads"),
    ("report", "checkpoint"),
    ("lab",),
    ("api",),
    ("",),  # the package itself: the public names
    ("bench",),
    ("cli",),
    ("__main__",),
)


def layer(module: str) -> int:
    """The row of a module (dotted, without the package's name); raises KeyError when no row covers it."""
    rows = {name: row for row, names in enumerate(LAYERS) for name in names}
    name = module
    while name and name not in rows:
        name = name.rpartition(".")[0]
    if module and not name:
        raise KeyError(module)
    return rows[name]


def owner(module: str) -> str:
    """The entry of LAYERS that covers a module: files of one entry may know each other."""
    return next(name for name in LAYERS[layer(module)] if module == name or module.startswith(name + "."))


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Every import of the package's own modules in a file, lazy ones and those for types included."""
    package = path.relative_to(ROOT).parent.parts
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head, _, rest = alias.name.partition(".")
                if head == "syncline":
                    yield node.lineno, rest
        elif isinstance(node, ast.ImportFrom):
            name = node.module or ""
            if node.level == 0:
                head, _, rest = name.partition(".")
                if head != "syncline":
                    continue
                base: tuple[str, ...] = tuple(rest.split(".")) if rest else ()
            else:
                base = package[: len(package) - node.level + 1] + (tuple(name.split(".")) if name else ())
            for alias in node.names:
                yield node.lineno, ".".join(resolve(base, alias.name))


def resolve(base: tuple[str, ...], name: str) -> tuple[str, ...]:
    """``from base import name`` means the module base.name if there is one, else something in base."""
    target = ROOT.joinpath(*base, name)
    if target.is_dir() or target.with_suffix(".py").is_file():
        return (*base, name)
    return base


FILES = sorted(ROOT.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_down(path: Path) -> None:
    me = module_of(path)
    if me == "":
        return  # the package loads its public names lazily, which test_light_import holds
    try:
        mine = layer(me)
    except KeyError:
        pytest.fail(f"no row of LAYERS covers {me}: say where it stands")
    for line, target in imports(path):
        if target and owner_or_none(target) == owner(me):
            continue
        assert layer(target) < mine, (
            f"{path.relative_to(ROOT)}:{line} imports {target or 'syncline'} from above or beside"
        )


def owner_or_none(module: str) -> str | None:
    try:
        return owner(module)
    except KeyError:
        return None


def test_a_module_without_a_row_is_noticed() -> None:
    with pytest.raises(KeyError):
        layer("utils")
    assert layer("predict.network.fit") < layer("predict.simulate")
    assert layer("frameworks.torch.replica") < layer("api")


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sync"
    folder.mkdir()
    (tmp_path / "errors.py").touch()
    (folder / "modes.py").write_text(
        "import os\nimport syncline.bench.train\nfrom syncline import errors\nfrom .. import errors\nfrom . import x\n"
        "def f():\n    from ..errors import SynclineError\n    from syncline.plan import Plan\n    import syncline\n"
    )
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    found = [target for _, target in sorted(imports(folder / "modes.py"))]
    assert found == ["bench.train", "errors", "errors", "sync", "errors", "plan", ""]
