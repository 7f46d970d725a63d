"""Machine code of kernels: what is kept of it, how it gets there, and how it is opened.

A module of kernels is compiled once per text and processor, by a process of its own (``compiler``), so that no other
one needs a compiler. What is kept in the folder for this text and processor (``places``), each as one file:

* the object;
* a shared library, linked once by ``ld`` where there is one, which the system maps into every process that needs it;
  it is linked with the C library, whose functions have versions: a name without one means the oldest, and glibc's
  oldest ``memcpy`` knows no instructions of later processors;
* a manifest: of which text, for which processor's features, with which hashes they are, and what functions are in them.

Without ``ld``, or where nothing may be run from files, llvmlite loads the object. What does not have the hash that the
manifest says, or is of another text or processor, is made anew. A process without a place, or that has waited too long
for another one that compiles and may have been stopped, has its code compiled for itself alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..errors import SynclineError
from .places import alone, keep, of_its_own, place_for
from .private import NotPrivateError, path_of, private_folder, read_file

log = logging.getLogger("syncline")

COMPILE_S = 600.0
"""How long the compiler, or the linker, may take."""

TOGETHER: Final = ("arrays", "beats", "onesided", "passes", "shares", "streams")
"""The modules of this folder that nearly every run needs: whoever needs one has all of them compiled at once."""

COMPILING: Final = "SYNCLINE_COMPILING"
"""Set in the environment of a compiler: who finds it and wants to start one is not what it was started as."""

_PROGRAM: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from syncline.kernels.compiler import main
main()
"""

_FEATURES: Final = (
    "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features", "isa", "cpu",
    "features",
)  # fmt: skip
"""What the system says of a processor that follows from its kind: not its clock, nor its defects."""

Addresses = Mapping[str, int]
"""The functions of a module that Python calls, by name."""

_one_thread = threading.RLock()
_opened: dict[str, Addresses] = {}
_engines: list[Any] = []
"""What llvmlite has loaded lives as long as its engine."""


def address(module: str, function: str) -> int:
    """The address of a function of a module of kernels, which is compiled where it has not been.

    Raises SynclineError when it cannot be.
    """
    with _one_thread:
        if module not in _opened:
            _opened.update(_open(module))
        return _opened[module][function]


def _open(module: str) -> Mapping[str, Addresses]:
    """The functions of a module, and of those that were compiled for this process alone together with it."""
    place = place_for(f"kernels-{digest(__name__)[:16]}-{processor()[:16]}")
    if place is not None:
        try:
            with private_folder(place.root, *place.names) as folder:
                if not _ready(folder, module):
                    with alone(folder, "together" if _is_together(module) else module):
                        _make(folder, module)
                return {module: _functions(folder, module)}
        except (
            OSError,
            ValueError,
            NotPrivateError,
        ) as error:  # it has changed since, or stays locked
            _say_once(f"machine code is not kept in {place.path}, this process compiles for itself: {error}")
    with of_its_own() as folder:
        return {made: _functions(folder, made) for made in _make(folder, module)}


@cache
def _say_once(text: str) -> None:
    log.warning("%s", text)


def _ready(folder: int, module: str) -> bool:
    """Whether a module can be opened without a compiler and without a linker."""
    manifest = _manifest(folder, module)
    return manifest is not None and (manifest["library"] is not None or manifest["linker"] == _linker())


def _make(folder: int, module: str) -> list[str]:
    """Compile and link what is missing of a module, and of those that belong together with it; which these are."""
    wanted = [f"{__package__}.{name}" for name in TOGETHER] if _is_together(module) else [module]
    missing = [other for other in wanted if _manifest(folder, other) is None]
    if missing:
        _compile(folder, missing)
    for other in wanted:
        if not _ready(folder, other):
            _link(folder, other)
    return wanted


def _is_together(module: str) -> bool:
    package, _, name = module.rpartition(".")
    return package == __package__ and name in TOGETHER


def _compile(folder: int, modules: Sequence[str]) -> None:
    """Have a process of its own compile modules into an open folder."""
    names = ", ".join(modules)
    if not sys.executable or COMPILING in os.environ:
        raise SynclineError(
            f"cannot compile {names}: {sys.executable or 'the program around this interpreter'} is not Python; start"
            " Syncline once under the same user's Python, which keeps the machine code"
        )
    wanted = [f"{name}={digest(name)}" for name in modules]
    command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(_path_to(modules)), str(folder), *wanted]
    # Neither the folder it starts in nor settings of Numba may change what everybody will run.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    try:
        said = _run(command, {**environment, COMPILING: "1"}, folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise SynclineError(f"compiling {names} failed: {error}") from None
    if any(_manifest(folder, module) is None for module in modules):
        raise SynclineError(f"compiling {names} failed: {said or 'it ended without a word'}")


def _path_to(modules: Sequence[str]) -> list[str]:
    """Where a compiler finds what this process has found; in the folder of the caller only if some of it is there."""
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    needed = [Path(__file__).parents[2], *(Path(sys.modules[name].__file__ or "").parent for name in modules
                                           if name.rpartition(".")[0] != __package__)]  # fmt: skip
    return [str(folder) for folder in needed if str(folder) not in path] + path


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None, *folders: int) -> str:
    """Run a program to which open folders are known; the last line of what it says of errors."""
    done = subprocess.run(
        command, pass_fds=folders, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace", timeout=COMPILE_S, check=False,
    )  # fmt: skip
    return "".join(done.stderr.strip().splitlines()[-1:])[:2000]


def _linker() -> str | None:
    return shutil.which("ld")


def _link(folder: int, module: str) -> None:
    """Make the shared library of a module that is there; the manifest says with which linker that was tried."""
    manifest = _manifest(folder, module)
    if manifest is None:
        raise SynclineError(f"the machine code of {module} was made but cannot be read: is the disk full?")
    linked, linker = b"", _linker()
    if linker is not None:
        linked, said = _linked(linker, _checked(folder, manifest["object"]))
        if not linked:
            log.warning("%s cannot link machine code, which costs every process some tens of MiB: %s", linker, said)
    # The system's loader knows a library by its name and never opens a second one of that name.
    found = hashlib.sha256(linked).hexdigest()
    library = [f"{module}-{found[:16]}.so", found] if linked else None
    if library is not None:
        keep(folder, library[0], linked)
    keep(folder, f"{module}.json", {**manifest, "library": library, "linker": linker})


def _linked(linker: str, code: bytes) -> tuple[bytes, str]:
    """A shared library made of an object, or nothing, and what the linker said."""
    with of_its_own() as own:
        given, made = path_of(own) / "code.o", path_of(own) / "code.so"
        given.write_bytes(code)
        command = [linker, "-shared", "-z", "noexecstack", "-o", str(made), str(given), *_c_library()]
        try:
            said = _run(command, None, own)
            return made.read_bytes() if made.exists() else b"", said
        except (OSError, subprocess.SubprocessError) as error:
            return b"", str(error)


@cache
def _c_library() -> list[str]:
    """The file of the C library of this process; none where it is part of the interpreter's own."""
    place = ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        (first, last), file = (int(end, 16) for end in line.split()[0].split("-")), line.partition("/")
        if first <= place < last and ".so" in file[2]:
            return ["".join(file[1:])]
    return []


def _manifest(folder: int, module: str) -> dict[str, Any] | None:
    """What an open folder has of a module; None when that is nothing, damaged, or of another text or processor."""
    try:
        manifest = dict(json.loads(read_file(folder, f"{module}.json", path_of(folder))))
        if (manifest["sources"], manifest["processor"]) != (digest(module), processor()):
            return None
        _checked(folder, manifest["object"] if manifest["library"] is None else manifest["library"])
        return {"linker": None, **manifest}
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _checked(folder: int, file: Sequence[str]) -> bytes:
    """The bytes of a file of a manifest, its name and hash; ValueError when they have another one."""
    name, wanted = file
    found = read_file(folder, name, path_of(folder))
    if hashlib.sha256(found).hexdigest() != wanted:
        raise ValueError(f"{name} is damaged")
    return found


def _functions(folder: int, module: str) -> Addresses:
    """The functions of a module that is there, opened."""
    manifest = _manifest(folder, module)
    if manifest is None:
        raise SynclineError(f"the machine code of {module} was made but cannot be read: is the disk full?")
    if manifest["library"] is not None:
        with contextlib.suppress(OSError):  # nothing may be run from files here
            return _mapped(folder, manifest["library"][0], manifest["functions"])
    return _loaded(_checked(folder, manifest["object"]), manifest["functions"])


def _mapped(folder: int, name: str, functions: Mapping[str, str]) -> Addresses:
    library = ctypes.CDLL(str(path_of(folder) / name))
    return {
        function: ctypes.cast(library[symbol], ctypes.c_void_p).value or 0 for function, symbol in functions.items()
    }


def _loaded(code: bytes, functions: Mapping[str, str]) -> Addresses:
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    engine = binding.create_mcjit_compiler(binding.parse_assembly(""), machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    _engines.append(engine)
    return {function: engine.get_function_address(symbol) for function, symbol in functions.items()}


@cache
def digest(module: str) -> str:
    """The SHA-256 of the text of all kernels here, and of a module that lies elsewhere."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    if not files:
        raise SynclineError("the text of the kernels is not there and cannot be compiled: install Syncline as files")
    if module.rpartition(".")[0] != __package__:
        files.append(Path(sys.modules[module].__file__ or ""))
    found = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        found.update(f"{file.name} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()


@cache
def processor() -> str:
    """The SHA-256 of what the system says of the first processor's kind and features."""
    said = [os.uname().machine]
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = (part.strip() for part in line.partition(":"))
            if not name:
                break
            if name in _FEATURES:
                said.append(f"{name} {value}")
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
