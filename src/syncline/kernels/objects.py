"""Machine code of kernels: what is kept of it, how it gets there, and how it is opened.

A module of kernels is compiled once per text and processor, by a process of its own (``compiler``), so that no other
one needs a compiler. What is kept in the folder for this text and processor (``places``), each as one file:

* the object;
* a manifest: of which text, for which processor's features, with which hash, and what functions are in it;
* a shared library, linked once by ``ld`` where there is one, which the system maps into every process that needs it.

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
import tempfile
import threading
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final

from ..errors import SynclineError
from .places import alone, keep, place_for
from .private import NotPrivateError, path_of, private_folder, read_file

log = logging.getLogger("syncline")

COMPILE_S = 600.0
"""How long the compiler, or the linker, may take."""

TOGETHER: Final = ("beats", "onesided", "passes", "pieces")
"""The modules of this folder that nearly every run needs: whoever needs one has all of them compiled at once."""

_FEATURES: Final = (
    "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features", "isa",
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
            _opened[module] = _open(module)
        return _opened[module][function]


def _open(module: str) -> Addresses:
    place = place_for(f"kernels-{digest(__name__)[:16]}-{processor()[:16]}")
    if place is not None:
        try:
            with private_folder(place.root, *place.names) as folder:
                return _kept(folder, module) or _made(folder, module)
        except (OSError, NotPrivateError) as error:  # it has changed since it was looked at, or stays locked
            log.debug("the machine code of %s is not kept in %s: %s", module, place.path, error)
    with tempfile.TemporaryDirectory(prefix="syncline-") as own, private_folder(Path(own).parent, Path(own).name) as fd:
        return _made(fd, module)


def _made(folder: int, module: str) -> Addresses:
    """The functions of a module, compiled now unless another process has just done so."""
    with alone(folder, "together" if _is_together(module) else module):
        if _manifest(folder, module) is None:
            _compile(folder, [module, *_companions(folder, module)])
        found = _kept(folder, module)
    if found is None:
        raise SynclineError(f"the machine code of {module} was made but cannot be read: is the disk full?")
    return found


def _companions(folder: int, module: str) -> list[str]:
    """What is compiled together with a module and is not there yet."""
    everything = [f"{__package__}.{name}" for name in TOGETHER] if _is_together(module) else []
    return [other for other in everything if other != module and _manifest(folder, other) is None]


def _is_together(module: str) -> bool:
    package, _, name = module.rpartition(".")
    return package == __package__ and name in TOGETHER


def _compile(folder: int, modules: Sequence[str]) -> None:
    """Have a process of its own compile modules into an open folder."""
    names = ", ".join(modules)
    if not sys.executable:
        raise SynclineError(f"cannot compile {names}: this process does not know which Python it runs under")
    command = [sys.executable, "-c", "from syncline.kernels.compiler import main; main()", str(folder), *modules]
    # It finds what this process finds, and nothing of the folder that it happens to start in.
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONSAFEPATH": "1"}
    try:
        _run(command, folder, environment)
    except subprocess.TimeoutExpired:
        raise SynclineError(f"compiling {names} took more than {COMPILE_S:.0f} s: is the machine overloaded?") from None
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()[-1:] or ["it said nothing"]
        raise SynclineError(f"compiling {names} failed with status {error.returncode}: {said[0][:2000]}") from None


def _run(command: Sequence[str], folder: int, environment: Mapping[str, str] | None = None) -> None:
    """Run a program to which an open folder is known."""
    subprocess.run(
        command, pass_fds=[folder], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace", timeout=COMPILE_S, check=True,
    )  # fmt: skip


def _manifest(folder: int, module: str) -> dict[str, Any] | None:
    """What an open folder has of a module; None when that is nothing, damaged, or of another text or processor."""
    try:
        manifest = dict(json.loads(read_file(folder, f"{module}.json", path_of(folder))))
        _checked(folder, manifest["object"])
        return manifest if (manifest["sources"], manifest["processor"]) == (digest(module), processor()) else None
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _checked(folder: int, file: Sequence[str]) -> bytes:
    """The bytes of a file of a manifest, its name and hash; ValueError when they have another one."""
    name, wanted = file
    found = read_file(folder, name, path_of(folder))
    if hashlib.sha256(found).hexdigest() != wanted:
        raise ValueError(f"{name} is damaged")
    return found


def _kept(folder: int, module: str) -> Addresses | None:
    """The functions of a module from an open folder; None when they are not there."""
    manifest = _manifest(folder, module)
    if manifest is None:
        return None
    library = _library(folder, module, manifest)
    if library is not None:
        with contextlib.suppress(OSError):  # nothing may be run from files here
            return _mapped(folder, library, manifest["functions"])
    return _loaded(_checked(folder, manifest["object"]), manifest["functions"])


def _library(folder: int, module: str, manifest: Mapping[str, Any]) -> str | None:
    """The name of a module's shared library, linked now where that has not been done; None without a linker."""
    try:
        _checked(folder, manifest["library"])
        return str(manifest["library"][0])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        linker = shutil.which("ld")
    if linker is None:
        return None
    code, digest_of_code = manifest["object"]
    # The system's loader knows a library by its name and never opens a second one of that name.
    name, path = f"{module}-{digest_of_code[:16]}.so", path_of(folder)
    fresh = f"{name}.{os.getpid()}"
    try:
        _run([linker, "-shared", "-z", "noexecstack", "-o", str(path / fresh), str(path / code)], folder)
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("cannot link %s: %s", name, error)
        return None
    linked = (path / fresh).read_bytes()
    os.unlink(fresh, dir_fd=folder)
    keep(folder, name, linked)
    keep(folder, f"{module}.json", {**manifest, "library": [name, hashlib.sha256(linked).hexdigest()]})
    return name


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
