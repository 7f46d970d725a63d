"""Imports point one way: a package may know only what stands below it, and no files know each other in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import syncline
import syncline_bench

ROOTS = {found.__name__: Path(next(iter(found.__path__))) for found in (syncline, syncline_bench)}

# From the bottom up: packages, and the modules beside them. What stands in one row does not know each other; a row is
# extended, or a new one put in between, with the package that is added. The library knows nothing of the laboratory.
ROWS = (
    ("errors", "version"),
    ("nouns", "kernels", "membership"),
    ("registry", "wire", "plans"),
    ("algorithms", "collectives", "codecs", "schedules", "sync", "transports"),
    ("compression",),
    ("strategy",),
    ("engine",),
    ("costs",),
    ("session",),
    ("tuning", "serving", "timeline"),
    ("launch", "saving", "testing", "sampling", "training", "metrics"),
    ("frameworks", "global_batches"),
    ("checkpoint", "optim", "process", "torch_backend"),
    ("recovery",),
    ("api", "jax", "lightning", "tensorflow"),
    ("",),  # the package itself: the public names
)
LABORATORY = (
    ("report", "searchers", "workloads"),
    ("predict",),
    ("lab", "reproduction"),
    ("",),  # what measures: all that no other row names
    ("cli",),
)
ROW = {
    package: row
    for row, packages in enumerate(
        (
            *(tuple(f"syncline.{name}" for name in names) for names in ROWS),
            *(tuple(f"syncline_bench.{name}" for name in names) for names in LABORATORY),
            ("syncline.__main__",),
        )
    )
    for package in packages
}


def package_of(module: str) -> str:
    """The key of ROW that a module belongs to, whether or not it is there."""
    top, _, rest = module.partition(".")
    name = f"{top}.{rest.partition('.')[0]}"
    return name if name in ROW or top == "syncline" else f"{top}."


@cache
def files() -> tuple[Path, ...]:
    """All files of both."""
    return tuple(path for root in ROOTS.values() for path in sorted(root.rglob("*.py")))


@dataclass(frozen=True)
class Source:
    """The statements of a file that the tests ask about; ``first`` are imports that run when the file is imported."""

    imports: tuple[ast.Import | ast.ImportFrom, ...]
    first: tuple[ast.Import | ast.ImportFrom, ...]
    classes: tuple[str, ...]
    threads: tuple[ast.Call, ...]


@cache
def source(path: Path) -> Source:
    """A file, which is parsed once for all tests."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    return Source(
        tuple(node for node in nodes if isinstance(node, ast.Import | ast.ImportFrom)),
        tuple(node for node in at_the_top(tree.body) if isinstance(node, ast.Import | ast.ImportFrom)),
        tuple(node.name for node in tree.body if isinstance(node, ast.ClassDef)),
        tuple(node for node in nodes if isinstance(node, ast.Call) and is_thread(node.func)),
    )


def is_thread(function: ast.expr) -> bool:
    """Whether it is ``threading.Thread``."""
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "Thread"
        and ast.unparse(function) == "threading.Thread"
    )


@cache
def module_of(path: Path) -> str:
    """The dotted name of a file."""
    (top,) = (name for name, root in ROOTS.items() if root in path.parents)
    parts = (top, *path.relative_to(ROOTS[top]).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: Path, lazy: bool = True) -> Iterator[tuple[int, str]]:
    """Every import of our own modules in a file, those for types, and ``lazy`` ones, included."""
    return ((line, target) for line, target, _ in imported_names(path, lazy))


def imported_names(path: Path, lazy: bool = True) -> Iterator[tuple[int, str, str]]:
    """As ``imports``, with what is imported from the module, or its name where it is the module."""
    module = tuple(module_of(path).split("."))
    package = module if path.name == "__init__.py" else module[:-1]
    found = source(path)
    for node in found.imports if lazy else found.first:
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] in ROOTS:
                    yield node.lineno, alias.name, alias.name
        else:
            name = tuple((node.module or "").split(".")) if node.module else ()
            base = package[: len(package) - node.level + 1] + name if node.level else name
            if base[0] not in ROOTS:
                continue
            for alias in node.names:
                yield node.lineno, ".".join(resolve(base, alias.name)), alias.name


def at_the_top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """What runs when a file is imported, or would run if types were (``if TYPE_CHECKING:``)."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from at_the_top(node.body)


def resolve(base: tuple[str, ...], name: str) -> tuple[str, ...]:
    """``from base import name`` means the module base.name if there is one, else something in base."""
    target = ROOTS[base[0]].joinpath(*base[1:], name)
    if target.is_dir() or target.with_suffix(".py").is_file():
        return (*base, name)
    return base


def imports_of_all(lazy: bool = True) -> dict[str, dict[str, str]]:
    """For every module those that it imports, with the place of the import."""
    found: dict[str, dict[str, str]] = {}
    for path in files():
        known = found.setdefault(module_of(path), {})
        for line, target in imports(path, lazy):
            known.setdefault(target, f"{module_of(path)}:{line}")
    return found


def test_imports_point_down() -> None:
    faults = []
    for module, targets in imports_of_all().items():
        mine = package_of(module)
        if mine not in ROW:
            faults.append(f"no row covers {module}: say where it stands")
            continue
        for target, place in targets.items():
            other = package_of(target)
            # The package itself loads its public names lazily, which test_light_import holds.
            if mine not in ("syncline.", other) and ROW.get(other, len(ROW)) >= ROW[mine]:
                faults.append(f"{place} imports {target} from above or beside")
    assert not faults, "\n".join(faults)


def test_what_is_imported_is_there() -> None:
    """Also where nothing that is installed here would load it."""
    there = {module_of(path) for path in files()}
    faults = [
        f"{place} imports {target}, which is no file"
        for targets in imports_of_all().values()
        for target, place in targets.items()
        if target not in there
    ]
    assert not faults, "\n".join(faults)


def test_no_files_import_each_other_in_a_circle() -> None:
    """When they are imported, for types alone too. A package may hand on what its files define."""
    graph = {
        module: {target for target in targets if target != "syncline" and not f"{target}.".startswith(f"{module}.")}
        for module, targets in imports_of_all(lazy=False).items()
        if module != "syncline"
    }
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as circle:
        pytest.fail(" imports ".join(reversed(circle.args[1])))


CORE = {"Exchange", "Part", "Piece", "Place", "Plan"}
"""Words of the core, which no second class bears, not even in private."""

MEETINGS = {"Meeting"}
"""That of a run's processes before they are connected, and that of its workers at a collective."""


def classes() -> dict[str, set[str]]:
    """For every name of public classes the modules that define one."""
    found: dict[str, set[str]] = {}
    for path in files():
        for name in source(path).classes:
            if not name.startswith("_"):
                found.setdefault(name, set()).add(module_of(path))
    return found


def names_from_elsewhere() -> set[tuple[str, str]]:
    """The names that modules import from other packages, each with the module that it is imported from."""
    return {
        (target, name)
        for path in files()
        for _, target, name in imported_names(path)
        if package_of(target) != package_of(module_of(path))
    }


def test_names_of_classes_do_not_meet() -> None:
    """Of the classes of one name at most one is used beyond its own package, and the core's words have one meaning."""
    used = names_from_elsewhere()
    faults = []
    for name, modules in sorted(classes().items()):
        public = sorted(module for module in modules if (module, name) in used)
        if name not in MEETINGS and (len(public) > 1 or (name in CORE and len(modules) > 1)):
            faults.append(f"{name} is a class of {', '.join(sorted(modules))}: give all but one a name that says more")
    assert not faults, "\n".join(faults)


def test_the_reader_of_imports_sees_all_forms(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "sync"
    folder.mkdir()
    for file in (tmp_path / "errors.py", tmp_path / "__init__.py", folder / "__init__.py"):
        file.touch()
    (folder / "modes.py").write_text(
        "import os\nimport syncline_bench.train\nfrom syncline import errors\nfrom .. import errors\nfrom . import x\n"
        "def f():\n    from ..errors import SynclineError\n    from syncline.nouns import Layer\n    import syncline\n"
    )
    monkeypatch.setitem(ROOTS, "syncline", tmp_path)
    found = [target for _, target in sorted(imports(folder / "modes.py"))]
    ours = ("errors", "errors", "sync", "errors", "nouns")
    assert found == ["syncline_bench.train", *(f"syncline.{name}" for name in ours), "syncline"]


def test_threads_of_our_own_are_known_by_their_names() -> None:
    """``session.member`` tells the user's threads from them."""
    for path in sorted(ROOTS["syncline"].rglob("*.py")):
        if "testing" in path.parts:
            continue
        for node in source(path).threads:
            names = [ast.unparse(word.value) for word in node.keywords if word.arg == "name"]
            assert "".join(names).lstrip("f").strip("'").startswith("syncline-"), f"{path}:{node.lineno}"


UNPICKLES = re.compile(
    r"^\s*(?!from pickle import dumps$)(?:import|from) (?:_?pickle|marshal|shelve|dill|cloudpickle|joblib)\b"
    r"|\b(?:torch|np|numpy)\.load\(|\ballow_pickle=True|\bread_pickle\("
    r"|\b(?:broadcast|gather|scatter|send|recv)_object(?:_list)?\("  # torch.distributed's, which pickle
    r"|\bcomm\w*\.(?:bcast|allgather|gather|scatter|alltoall|send|recv|isend|irecv)\(",  # mpi4py's, which pickle
    re.MULTILINE,
)


def test_nothing_is_unpickled() -> None:
    """Neither what comes over the network nor files, as SECURITY.md says. PyTorch's analyzer reads what is pickled."""
    assert {path: found for path in files() if (found := UNPICKLES.findall(path.read_text()))} == {}
    for line in (
        "import pickle\n",
        "from pickle import dumps, loads\n",
        "    from marshal import loads",
        "x = np.load(f)",
        "comm.bcast(1)",
        "d.recv_object(",
    ):
        assert UNPICKLES.search(line), line
