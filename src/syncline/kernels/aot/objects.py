"""Keeps the machine code of kernels in the user's cache, shares it between processes, and opens it.

A module of kernels is compiled once per source text and processor, by a process of its own (``compiler``): no other
process loads a compiler. The cache holds three files for a module:

* the object;
* a shared library, which ``ld`` links once and the system then maps into every process. It is linked against the C
  library, because symbols there have versions and an unversioned one means the oldest; glibc's oldest ``memcpy`` does
  not use the instructions of later processors;
* a manifest: the digest of the source text, the processor's features, the hashes of both files, and their kernels.

llvmlite loads the object where there is no ``ld`` or where libraries cannot be mapped from the cache. A file with
another hash, or a manifest of another text or processor, is made again.

The cache is ``XDG_CACHE_HOME`` or ``~/.cache``, or a temporary folder where that cannot be written. Since its content
is run, a folder that another user could have written is not used (``private``); a warning says so once. A process
without a usable folder, or that has waited too long for the lock of another one, compiles for itself alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

from ...errors import SynclineError
from ..private import NotPrivateError, cache_home, check_contents, path_of, private_folder, read_file

log = logging.getLogger("syncline")

COMPILE_S = 600.0
"""Time limit of the compiler and of the linker."""

LOCK_S = 180.0
"""How long a process waits for another one that compiles before it compiles for itself."""

LEFT_S = 60.0
"""Age from which an unlocked temporary folder counts as the remains of a killed process."""

_KERNELS: Final = "syncline.kernels"

TOGETHER: Final = tuple(f"{_KERNELS}.{name}" for name in ("onesided", "passes", "streams"))
"""The modules that nearly every run needs. They are compiled together, since starting Numba takes seconds."""

COMPILING: Final = "SYNCLINE_COMPILING"
"""Set in the environment of a compiler. If a compiler needs another one, ``sys.executable`` is not Python: a program
that embeds the interpreter has started itself."""

_PROGRAM: Final = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from syncline.kernels.aot.compiler import main
main()
"""

_FEATURES: Final = (
    "vendor_id", "cpu family", "model", "flags", "CPU implementer", "CPU part", "CPU variant", "Features", "isa", "cpu",
    "features",
)  # fmt: skip
"""Fields of /proc/cpuinfo that depend on the model of a processor: not its clock, not its bugs."""

Addresses = Mapping[str, int]
"""The entries of a module's kernels, by the kernels' names."""

_one_thread = threading.RLock()
_opened: dict[str, Addresses] = {}
_engines: list[Any] = []
"""Keeps llvmlite's engines, which own the code that they have loaded."""
_given_up = threading.Event()
"""Set once this process has waited ``LOCK_S`` in vain: it does not wait again."""


class CacheFolder(NamedTuple):
    """A folder for machine code: ``names``, each inside the one before it, in ``root``."""

    root: Path
    names: tuple[str, ...]

    @property
    def path(self) -> Path:
        """The whole path."""
        return self.root.joinpath(*self.names)


def address(module: str, function: str) -> int:
    """The address of a kernel's entry; compiles its module if the cache does not have it.

    Raises SynclineError if the module cannot be compiled.
    """
    with _one_thread:
        if module not in _opened:
            _opened.update(_open(module))
        return _opened[module][function]


def _open(module: str) -> Mapping[str, Addresses]:
    """The entries of a module, and of all modules that had to be compiled for this process alone together with it."""
    place = place_for(f"kernels-{digest(__name__)[:16]}-{processor()[:16]}")
    if place is not None:
        try:
            with private_folder(place.root, *place.names) as folder:
                if not _ready(folder, module):
                    with alone(folder, "together" if module in TOGETHER else module):
                        _make(folder, module)
                return {module: _functions(folder, module)}
        except (OSError, ValueError, NotPrivateError) as error:  # the folder has changed since, or stays locked
            _warn_once(f"machine code is not kept in {place.path}; this process compiles for itself: {error}")
    with of_its_own() as folder:
        return {made: _functions(folder, made) for made in _make(folder, module)}


@cache
def _warn_once(text: str) -> None:
    log.warning("%s", text)


def _ready(folder: int, module: str) -> bool:
    """Whether a module can be opened without running a compiler or a linker."""
    manifest = _manifest(folder, module)
    return manifest is not None and (manifest["library"] is not None or manifest["linker"] == _linker())


def _make(folder: int, module: str) -> list[str]:
    """Compile and link a module, with all of ``TOGETHER`` if it is one of them; return the modules."""
    wanted = list(TOGETHER) if module in TOGETHER else [module]
    missing = [other for other in wanted if _manifest(folder, other) is None]
    if missing:
        _compile(folder, missing)
    for other in wanted:
        if not _ready(folder, other):
            _link(folder, other)
    return wanted


def _is_ours(module: str) -> bool:
    return module.startswith(f"{_KERNELS}.")


def _compile(folder: int, modules: Sequence[str]) -> None:
    """Start a process that compiles modules into an open folder."""
    names = ", ".join(modules)
    if not sys.executable or COMPILING in os.environ:
        raise SynclineError(
            f"cannot compile {names}: {sys.executable or 'the program around this interpreter'} is not Python; start"
            " Syncline once under the same user's Python, which keeps the machine code"
        )
    wanted = [f"{name}={digest(name)}" for name in modules]
    command = [sys.executable, "-I", "-c", _PROGRAM, json.dumps(_path_to(modules)), str(folder), *wanted]
    # Every later process runs this code: neither a working directory nor settings of Numba may change it.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("NUMBA_")}
    try:
        said = _run(command, {**environment, COMPILING: "1"}, folder)
    except (OSError, subprocess.SubprocessError) as error:
        raise SynclineError(f"compiling {names} failed: {error}") from None
    if any(_manifest(folder, module) is None for module in modules):
        raise SynclineError(f"compiling {names} failed: {said or 'the compiler ended without a message'}")


def _path_to(modules: Sequence[str]) -> list[str]:
    """This process's import path without the working directory, unless a module of ``modules`` lies there."""
    path = [str(Path(entry).absolute()) for entry in sys.path if entry]
    others = [name for name in modules if not _is_ours(name)]
    needed = [Path(__file__).parents[3], *(Path(sys.modules[name].__file__ or "").parent for name in others)]
    return [str(folder) for folder in needed if str(folder) not in path] + path


def _run(command: Sequence[str], environment: Mapping[str, str] | None = None, *folders: int) -> str:
    """Run a program that inherits open folders; return the last line of its standard error."""
    done = subprocess.run(
        command, pass_fds=folders, env=environment, cwd="/", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE, text=True, errors="replace", timeout=COMPILE_S, check=False,
    )  # fmt: skip
    return "".join(done.stderr.strip().splitlines()[-1:])[:2000]


def _linker() -> str | None:
    return shutil.which("ld")


def _link(folder: int, module: str) -> None:
    """Link the shared library of a compiled module.

    The manifest records the linker, so that a failure is not retried.
    """
    manifest = _manifest(folder, module)
    if manifest is None:
        raise SynclineError(f"the machine code of {module} was made but cannot be read: is the disk full?")
    linked, linker = b"", _linker()
    if linker is not None:
        linked, said = _linked(linker, _checked(folder, manifest["object"]))
        if not linked:
            log.warning("%s cannot link machine code, which costs every process some tens of MiB: %s", linker, said)
    # The dynamic loader identifies a library by its name, so another content needs another name.
    found = hashlib.sha256(linked).hexdigest()
    library = [f"{module}-{found[:16]}.so", found] if linked else None
    if library is not None:
        keep(folder, library[0], linked)
    keep(folder, f"{module}.json", {**manifest, "library": library, "linker": linker})


def _linked(linker: str, code: bytes) -> tuple[bytes, str]:
    """Link an object into a shared library; return its bytes, empty on failure, and the linker's message."""
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
    """The file of this process's C library; empty where it is linked into the interpreter."""
    place = ctypes.cast(ctypes.CDLL(None).memcpy, ctypes.c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines():
        (first, last), file = (int(end, 16) for end in line.split()[0].split("-")), line.partition("/")
        if first <= place < last and ".so" in file[2]:
            return ["".join(file[1:])]
    return []


def _manifest(folder: int, module: str) -> dict[str, Any] | None:
    """The manifest of a module in an open folder; None if it is missing, damaged, or of another text or processor."""
    try:
        manifest = dict(json.loads(read_file(folder, f"{module}.json", path_of(folder))))
        if (manifest["sources"], manifest["processor"]) != (digest(module), processor()):
            return None
        _checked(folder, manifest["object"] if manifest["library"] is None else manifest["library"])
        return {"linker": None, **manifest}
    except (FileNotFoundError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _checked(folder: int, file: Sequence[str]) -> bytes:
    """The bytes of a file that a manifest lists by name and hash; ValueError if the hash differs."""
    name, wanted = file
    found = read_file(folder, name, path_of(folder))
    if hashlib.sha256(found).hexdigest() != wanted:
        raise ValueError(f"{name} is damaged")
    return found


def _functions(folder: int, module: str) -> Addresses:
    """Open a compiled module and return its entries."""
    manifest = _manifest(folder, module)
    if manifest is None:
        raise SynclineError(f"the machine code of {module} was made but cannot be read: is the disk full?")
    if manifest["library"] is not None:
        with contextlib.suppress(OSError):  # the file system forbids executable mappings (noexec)
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
def place_for(name: str) -> CacheFolder | None:
    """The cache folder of that name; None if no candidate can be written or trusted."""
    found, refused = None, list[str]()
    for place in _places(name):
        try:
            with private_folder(place.root, *place.names) as folder:
                if not os.access(path_of(folder), os.W_OK):
                    continue
                check_contents(folder, place.path)
        except NotPrivateError as error:
            refused.append(str(error))
        except OSError:
            continue
        else:
            found = place
            break
    if refused:
        instead = "every process compiles for itself" if found is None else f"it is kept in {found.path}"
        log.warning("machine code is not loaded from where other users could have put it; %s. %s", instead, refused[0])
    return found


def _places(name: str) -> list[CacheFolder]:
    temporary = Path(tempfile.gettempdir())
    return [CacheFolder(cache_home(), ("syncline", name)), CacheFolder(temporary, (f"syncline-{os.getuid()}", name))]


@contextlib.contextmanager
def of_its_own() -> Iterator[int]:
    """A temporary folder of this process, as a descriptor. Also removes those that killed processes have left."""
    begins = f"syncline-{os.getuid()}-code-"
    for left in Path(tempfile.gettempdir()).glob(f"{begins}*"):
        with contextlib.suppress(OSError, NotPrivateError), private_folder(left.parent, left.name) as folder:
            if (
                time.time() - os.fstat(folder).st_mtime > LEFT_S
            ):  # the owner of a younger one may not have locked it yet
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=begins) as own, private_folder(Path(own).parent, Path(own).name) as folder:
        fcntl.flock(folder, fcntl.LOCK_EX)  # held until all processes that inherit it end
        yield folder


def keep(folder: int, name: str, what: bytes | Mapping[str, Any]) -> None:
    """Write a file, bytes or JSON, into an open folder, atomically: a reader sees the old content or the new one."""
    fresh = (
        f"{name}.{secrets.token_hex(8)}"  # a home may be shared by machines and containers, so no process id is unique
    )
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with os.fdopen(os.open(fresh, flags, 0o600, dir_fd=folder), "wb") as file:
        file.write(what if isinstance(what, bytes) else json.dumps(what, indent=1).encode())
    os.rename(fresh, name, src_dir_fd=folder, dst_dir_fd=folder)


@contextlib.contextmanager
def alone(folder: int, what: str) -> Iterator[None]:
    """Hold the lock of ``what`` in a folder, so that one process compiles while others wait.

    Raises TimeoutError after ``LOCK_S``.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    lock = os.open(f"{what}.lock", flags, 0o600, dir_fd=folder)
    try:
        _lock(lock)
        yield
    finally:
        os.close(lock)


def _lock(fd: int) -> None:
    """Lock a file by polling, since flock(2) has no timeout."""
    wait_s, deadline = 0.0005, time.monotonic() + (0 if _given_up.is_set() else LOCK_S)
    while True:
        try:
            return fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                _give_up()
                raise TimeoutError("the folder for machine code stays locked") from None
            time.sleep(wait_s)
            wait_s = min(2 * wait_s, 0.05)


def _give_up() -> None:
    if not _given_up.is_set():
        log.warning(
            "another process has locked the folder for machine code for more than %.0f s (is it stopped?):"
            " not using it",
            LOCK_S,
        )
    _given_up.set()


@cache
def digest(module: str) -> str:
    """The SHA-256 of the source text of all kernels and this package, and of ``module`` if it lies elsewhere."""
    files = sorted(Path(__file__).parent.glob("*.py")) + sorted(Path(__file__).parents[1].glob("*.py"))
    if not files:
        raise SynclineError(
            "the source text of the kernels is missing, so they cannot be compiled: install Syncline as files,"
            " not as an archive"
        )
    if not _is_ours(module):
        files.append(Path(sys.modules[module].__file__ or ""))
    found = hashlib.sha256()
    for file in files:
        text = file.read_bytes()
        found.update(f"{file.name} {len(text)}\n".encode())
        found.update(text)
    return found.hexdigest()


@cache
def processor() -> str:
    """The SHA-256 of the model and features of the first processor in /proc/cpuinfo."""
    said = [os.uname().machine]
    with contextlib.suppress(OSError), Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as file:
        for line in file:
            name, _, value = (part.strip() for part in line.partition(":"))
            if not name:
                break
            if name in _FEATURES:
                said.append(f"{name} {value}")
    return hashlib.sha256("\n".join(said).encode()).hexdigest()
