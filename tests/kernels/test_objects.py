"""The cache of machine code: its folder and locks, what several processes share, and what is made anew."""

from __future__ import annotations

import ctypes
import fcntl
import importlib
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

from syncline.errors import SynclineError
from syncline.kernels.aot import objects
from syncline.kernels.private import path_of, private_folder, read_file

LIMIT_S = 120.0

KERNEL = """
import numpy as np
from syncline.kernels.aot.compiled import compiled
from syncline.kernels.aot.native import free, malloc

@compiled("(int64[]) -> int64")
def total(numbers):
    found = 0
    for i in range(numbers.size):
        found += numbers[i]
    return found
"""
SUM_UP = """
import sys
import numpy as np
import small_kernels
print(small_kernels.total(np.arange(5)), *({"numba", "llvmlite"} & set(sys.modules)))
"""
NAME = "small_kernels"


def with_syncline_kept(root: Path) -> None:
    """A cache in which Syncline's own kernels are: to compile them takes half a minute, and is not what is tried."""
    importlib.import_module("syncline.kernels.passes")
    kept = objects.place_for(f"kernels-{objects.digest(objects.__name__)[:16]}-{objects.processor()[:16]}")
    if kept is not None:
        assert (kept.path / "syncline.kernels.passes.json").exists()
        (root / "cache" / "syncline").mkdir(mode=0o700, parents=True)
        shutil.copytree(kept.path, root / "cache" / "syncline" / kept.path.name)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A module of kernels, ``small_kernels``, and the cache after two processes that needed it at once."""
    root = tmp_path_factory.mktemp("made")
    with_syncline_kept(root)
    (root / f"{NAME}.py").write_text(KERNEL)
    for process in [start(root), start(root)]:
        assert ended(process) == ["10"]
    return root


def start(root: Path, **environment: str) -> subprocess.Popen[str]:
    """A process that calls a kernel, and prints its result and what of the compiler it has loaded."""
    path = os.pathsep.join([str(root), *filter(None, sys.path)])
    environment = {**os.environ, "XDG_CACHE_HOME": str(root / "cache"), "PYTHONPATH": path, **environment}
    script = f"import os\nos.umask(0o002)\n{SUM_UP}"  # what others may write would not be opened
    return subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, stdout=-1, stderr=-1)


def ended(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert not errors
    return out.split()


def folder_of(root: Path) -> Path:
    (folder,) = (root / "cache" / "syncline").iterdir()
    return folder


def files(root: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder_of(root).iterdir()}


def test_who_needs_compiled_kernels_loads_no_compiler_and_changes_nothing(made: Path) -> None:
    before = files(made)
    assert ended(start(made)) == ["10"]
    assert files(made) == before
    assert {Path(name).suffix for name in before} >= {".json", ".o"}
    for file in folder_of(made).iterdir():
        assert file.stat().st_mode & 0o077 == 0


def test_without_a_linker_llvmlite_opens_the_object_and_a_later_process_with_one_links_it(
    made: Path, tmp_path: Path
) -> None:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    folder = folder_of(tmp_path)
    manifest = json.loads((folder / f"{NAME}.json").read_text())
    (folder / f"{NAME}.json").write_text(json.dumps({**manifest, "library": None, "linker": None}))
    for library in folder.glob(f"{NAME}-*.so"):
        library.unlink()
    assert ended(start(tmp_path, PATH="")) == ["10", "llvmlite"]
    assert not list(folder.glob(f"{NAME}-*.so"))
    linked = shutil.which("ld") is not None
    assert ended(start(tmp_path)) == (["10"] if linked else ["10", "llvmlite"])
    assert len(list(folder.glob(f"{NAME}-*.so"))) == linked


@pytest.fixture
def own(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    """Imports the module here, with a cache of its own that has what was made."""
    shutil.copytree(folder_of(made), tmp_path / "cache" / "kernels")
    importlib.import_module("syncline.kernels.passes")  # of the cache of these tests
    monkeypatch.setattr(objects, "place_for", lambda _: objects.CacheFolder(tmp_path, ("cache", "kernels")))
    monkeypatch.setattr(objects, "_opened", {})
    monkeypatch.syspath_prepend(str(made))

    def imported() -> ModuleType:
        monkeypatch.delitem(sys.modules, NAME, raising=False)
        objects._opened.clear()  # type: ignore[attr-defined]
        objects.digest.cache_clear()
        return importlib.import_module(NAME)

    return imported


def total_of(module: ModuleType) -> int:
    import numpy as np

    return int(module.total(np.arange(5)))


def replaced(path: Path, change: Mapping[str, object]) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))


def damaged(folder: Path, library: Callable[[bytes], bytes]) -> None:
    """With other bytes in other files of the same names: who changes one that is mapped takes its memory away."""
    for file in folder.glob(f"{NAME}-*.so"):
        changed = library(file.read_bytes())
        file.unlink()
        file.write_bytes(changed)


def unlinked(folder: Path, code: Callable[[bytes], bytes | None]) -> None:
    """Without a library the object is what counts."""
    replaced(folder / f"{NAME}.json", {"library": None, "linker": None})
    for file in folder.glob(f"{NAME}-*.o"):
        changed = code(file.read_bytes())
        if changed is None:
            file.unlink()
        else:
            file.write_bytes(changed)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "nothing": lambda folder: [file.unlink() for file in folder.iterdir()],
    "no object": lambda folder: unlinked(folder, lambda _: None),
    "half an object": lambda folder: unlinked(folder, lambda code: code[:99]),
    "half a library": lambda folder: damaged(folder, lambda library: library[:99]),
    "another's library": lambda folder: damaged(folder, lambda _: b"!"),
    "no manifest": lambda folder: (folder / f"{NAME}.json").unlink(),
    "half a manifest": lambda folder: (folder / f"{NAME}.json").write_text('{"sources": "'),
    "another's manifest": lambda folder: (folder / f"{NAME}.json").write_text("[1, 2]"),
    "another text": lambda folder: replaced(folder / f"{NAME}.json", {"sources": "0" * 64}),
    "another processor": lambda folder: replaced(folder / f"{NAME}.json", {"processor": "0" * 64}),
    "a manifest without files": lambda folder: replaced(folder / f"{NAME}.json", {"object": None, "library": None}),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_not_of_this_text_or_damaged_is_made_anew(
    own: Callable[[], ModuleType], what: str, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compilations = list[list[str]]()

    def compile_again(folder: int, modules: list[str]) -> None:
        compilations.append(modules)
        for name, content in files(made).items():
            objects.keep(folder, name, content)

    monkeypatch.setattr(objects, "_compile", compile_again)
    assert total_of(own()) == 10
    assert not compilations
    DAMAGE[what](tmp_path / "cache" / "kernels")
    assert total_of(own()) == 10
    assert compilations == [[NAME]]


def test_where_libraries_cannot_be_mapped_the_object_is_loaded(
    own: Callable[[], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = objects.ctypes.CDLL

    def refusing(path: str, **options: object) -> object:
        if NAME in path:
            raise OSError(f"{path}: failed to map segment from shared object")
        return real(path, **options)

    monkeypatch.setattr(objects.ctypes, "CDLL", refusing)
    before = len(objects._engines)
    assert total_of(own()) == 10
    assert len(objects._engines) == before + 1


def test_without_a_place_code_is_made_for_this_process_alone(
    own: Callable[[], ModuleType], made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody else's place, one that stays locked, and one that became another's since it was looked at."""
    monkeypatch.setattr(objects.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(objects, "_compile", lambda fd, _: shutil.copytree(
        folder_of(made), objects.path_of(fd), dirs_exist_ok=True))  # fmt: skip
    kept = tmp_path / "cache" / "kernels"
    for file in kept.iterdir():
        file.unlink()
    kept.chmod(0o777)
    assert total_of(own()) == 10
    kept.chmod(0o700)

    def locked(folder: int, _: str) -> nullcontext[None]:
        if objects.path_of(folder).readlink() == kept:
            raise TimeoutError
        return nullcontext()

    monkeypatch.setattr(objects, "alone", locked)
    assert total_of(own()) == 10
    monkeypatch.setattr(objects, "place_for", lambda _: None)
    assert total_of(own()) == 10
    assert not list(kept.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("return np.empty(size[0], np.int64)[0]", "Only accept returning of array passed into the function"),
        pytest.param(
            "if size.size == 0: raise ValueError(0)\n    return 0",
            "may neither raise nor allocate",
            marks=pytest.mark.slow,
        ),
        ("return size.nonsense", "Unknown attribute 'nonsense'"),
    ],
)
def test_a_kernel_that_raises_or_allocates_is_refused(
    own: Callable[[], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, said: str
) -> None:
    """What needs Numba's runtime or Python's cannot be opened without them."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / f"{NAME}.py").write_text(
        KERNEL
        + f"""
@compiled("(int64[]) -> int64")
def bad(size):
    {body}
"""
    )
    monkeypatch.syspath_prepend(str(tmp_path / "bad"))
    objects.digest.cache_clear()
    with pytest.raises(SynclineError, match=f"compiling {NAME} failed: {NAME}: .*({said})"):
        own()


def test_another_text_is_another_digest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("elsewhere")
    module.__file__ = str(tmp_path / "elsewhere.py")
    monkeypatch.setitem(sys.modules, "elsewhere", module)
    found = set[str]()
    for text in ("x = 1", "x = 2", "x = 1\ny = 2"):
        Path(module.__file__).write_text(text)
        found.add(objects.digest.__wrapped__("elsewhere"))
    assert len(found) == 3
    assert objects.digest("syncline.kernels.passes") == objects.digest("syncline.kernels.aot.objects")


def test_what_nearly_every_run_needs_is_compiled_together_once_though_nothing_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compilations, opened = list[list[str]](), list[str]()
    monkeypatch.setattr(objects, "_opened", {})
    monkeypatch.setattr(objects, "place_for", lambda _: None)
    monkeypatch.setattr(objects, "_compile", lambda _, modules: compilations.append(modules))
    monkeypatch.setattr(objects, "_link", lambda *_: None)
    monkeypatch.setattr(objects, "_functions", lambda _, module: opened.append(module) or {"f": 1})
    wanted = list(objects.TOGETHER)
    assert [objects.address(module, "f") for module in wanted] == [1] * len(wanted)
    assert compilations == [wanted]
    assert opened == wanted
    assert objects.address("syncline.kernels.cast", "f") == 1
    assert compilations[1:] == [["syncline.kernels.cast"]]


@pytest.mark.skipif(shutil.which("ld") is None, reason="there is no linker")
def test_a_linker_that_fails_is_said_and_not_tried_again(
    own: Callable[[], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    failing = tmp_path / "ld"
    failing.write_text("#!/bin/sh\necho no such emulation >&2\nexit 1\n")
    failing.chmod(0o755)
    monkeypatch.setattr(objects, "_linker", lambda: str(failing))
    unlinked(tmp_path / "cache" / "kernels", lambda code: code)
    for _ in range(2):
        assert total_of(own()) == 10
    (said,) = caplog.messages
    assert "no such emulation" in said
    manifest = json.loads((tmp_path / "cache" / "kernels" / f"{NAME}.json").read_text())
    assert (manifest["library"], manifest["linker"]) == (None, str(failing))


@pytest.mark.skipif(shutil.which("ld") is None, reason="there is no linker")
def test_a_library_copies_memory_as_this_process_does() -> None:
    """Not linked with the C library, it would get the oldest function of that name, which is half as fast."""
    name = "syncline.kernels.onesided"
    objects.address(name, "advance")
    kept = objects.place_for(f"kernels-{objects.digest(objects.__name__)[:16]}-{objects.processor()[:16]}")
    if kept is None:
        pytest.skip("nothing is kept here")
    library = ctypes.CDLL(str(kept.path / json.loads((kept.path / f"{name}.json").read_text())["library"][0]))
    addresses = [ctypes.cast(found.memcpy, ctypes.c_void_p).value for found in (library, ctypes.CDLL(None))]
    assert addresses[0] == addresses[1]


def test_a_compiler_obeys_neither_its_folder_nor_settings_of_numba(made: Path, tmp_path: Path) -> None:
    """What it makes is run by every later process."""
    for name in ("hashlib.py", "numba.py", ".numba_config.yaml"):
        (tmp_path / name).write_text("raise SystemExit(f'{__file__} was run')")
    with_syncline_kept(tmp_path)
    script = f"import os, sys, hashlib\nos.chdir({str(tmp_path)!r})\n{SUM_UP}"
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "NUMBA_DISABLE_JIT": "1", "NUMBA_OPT": "0"}
    environment["PYTHONPATH"] = os.pathsep.join([str(made), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, text=True, capture_output=True, timeout=LIMIT_S, check=False
    )
    assert (done.stdout.split(), done.stderr) == (["10"], "")


@pytest.mark.parametrize("how", ["other text", "no python", "a compiler that starts itself", "time"])
def test_why_nothing_was_compiled_is_said(
    own: Callable[[], ModuleType], how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file in (tmp_path / "cache" / "kernels").iterdir():
        file.unlink()
    said = {
        "other text": "is not the caller's",
        "no python": "is not Python",
        "a compiler that starts itself": "is not Python",
        "time": "timed out after",
    }[how]
    if how == "other text":
        monkeypatch.setattr(objects, "digest", cache(lambda _: "0" * 64))
    elif how == "no python":
        monkeypatch.setattr(sys, "executable", "")
    elif how == "time":
        monkeypatch.setattr(objects, "COMPILE_S", 0.0)
    else:
        monkeypatch.setenv(objects.COMPILING, "1")
    with pytest.raises(SynclineError, match=f"compil.*{NAME}.*{said}"):
        own()


@pytest.fixture
def roots(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Path, Path]:
    """The user's cache, and the folder for temporary files."""
    cache, temporary = tmp_path / "cache", tmp_path / "tmp"
    cache.mkdir()
    temporary.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    monkeypatch.setattr(objects.tempfile, "gettempdir", lambda: str(temporary))
    return cache, temporary


def chosen() -> Path | None:
    """Where machine code would be kept."""
    place = objects.place_for.__wrapped__("kernels")
    return None if place is None else place.path


def test_the_users_cache_comes_first(roots: tuple[Path, Path]) -> None:
    assert chosen() == roots[0] / "syncline" / "kernels"


def test_where_the_cache_cannot_be_written_a_temporary_folder_does(roots: tuple[Path, Path]) -> None:
    (roots[0] / "syncline").write_text("a file in the way")
    found = chosen()
    assert found is not None
    assert found.parent == roots[1] / f"syncline-{os.getuid()}"
    assert found.parent.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_write_to_is_not_used(roots: tuple[Path, Path]) -> None:
    """Whoever can write there could have this process run what he likes."""
    (roots[0] / "syncline").write_text("a file in the way")
    open_to_all = roots[1] / f"syncline-{os.getuid()}"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert chosen() is None


@pytest.mark.parametrize("where", [".", "inner", "inner/code.so", "code.o"])
@pytest.mark.parametrize("how", ["group", "others", "link", "owner"])
def test_a_cache_that_others_could_have_written_is_not_used_and_said_once(
    roots: tuple[Path, Path], where: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = chosen()
    assert folder is not None
    (folder / "inner").mkdir(mode=0o700)
    for name in ("inner/code.so", "code.o"):
        (folder / name).touch(mode=0o600)
    assert chosen() == folder
    spoil(folder / where, how)
    again = chosen()
    assert again is not None
    assert again.parent.parent == roots[1]
    (said,) = caplog.messages
    assert f"it is kept in {again}" in said
    assert str(folder / where) in said
    assert "remove it" in said


def spoil(path: Path, how: str) -> None:
    if how == "link":
        path.rename(path.with_name("elsewhere"))
        path.symlink_to(path.with_name("elsewhere"))
    elif how == "owner":
        if os.geteuid() != 0:
            pytest.skip("only root can give files away")
        os.chown(path, 54321, -1)
    else:
        path.chmod(0o770 if how == "group" else 0o707)


@pytest.mark.parametrize("umask", [0, 0o002, 0o077])
def test_what_is_kept_is_this_users_alone_and_replaced_in_one_piece(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        with private_folder(tmp_path, "cache") as folder:
            objects.keep(folder, "code", b"old")
            with (tmp_path / "cache" / "code").open("rb") as reader:
                objects.keep(folder, "code", b"new")
                assert reader.read() == b"old"
            assert read_file(folder, "code", tmp_path) == b"new"
    finally:
        os.umask(before)
    (file,) = (tmp_path / "cache").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600


def test_a_folder_that_stays_locked_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(objects, "LOCK_S", 0.0)
    monkeypatch.setattr(objects, "_given_up", threading.Event())
    with private_folder(tmp_path, "cache") as folder, (tmp_path / "cache" / "code.lock").open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        for limit_s in (0.0, 1e9):  # who has given up once does not wait again
            monkeypatch.setattr(objects, "LOCK_S", limit_s)
            with pytest.raises(TimeoutError, match="stays locked"), objects.alone(folder, "code"):
                pass
        with objects.alone(folder, "other code"):
            pass
    (said,) = caplog.messages
    assert "another process has locked" in said


def test_one_waits_until_the_other_is_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused, came = threading.Event(), threading.Event()
    monkeypatch.setattr(objects.time, "sleep", lambda _: refused.set())

    def second() -> None:
        with private_folder(tmp_path, "cache") as folder, objects.alone(folder, "code"):
            came.set()

    with private_folder(tmp_path, "cache") as folder:
        with objects.alone(folder, "code"):
            thread = threading.Thread(target=second)
            thread.start()
            assert refused.wait(60)
            assert not came.is_set()
        assert came.wait(60)
        thread.join(60)


def test_who_has_no_home_keeps_it_in_a_temporary_folder(
    roots: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a container's user without an entry; a relative folder would be another one everywhere."""
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "expanduser", homeless)
    found = chosen()
    assert found is not None
    assert found.is_relative_to(roots[1])


def homeless(path: Path) -> Path:
    raise RuntimeError(f"Could not determine home directory for {path}")


def test_folders_that_killed_processes_have_left_are_removed_and_those_in_use_are_not(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(objects.tempfile, "tempdir", str(tmp_path))
    with objects.of_its_own() as used:
        in_use = path_of(used).resolve()
        (in_use / "code.o").write_bytes(b"code")
        left, young = (in_use.with_name(in_use.name + end) for end in ("left", "young"))
        for folder in (left, young):
            folder.mkdir(mode=0o700)
            (folder / "code.o").write_bytes(b"code")
        for folder in (in_use, left):
            os.utime(folder, (0, 0))
        with objects.of_its_own() as other:
            assert {in_use, young, path_of(other).resolve()} == set(tmp_path.iterdir())
    assert list(tmp_path.iterdir()) == [young]
