"""Makes the machine code of kernels with Numba: the process that ``objects`` starts.

Every function is compiled without Numba's runtime: it can neither allocate nor raise, and needs nothing of Python or
Numba when it runs. Python calls it through an *entry* that takes the address of its parameters (``compiled``). The
functions of a module and what they call become one object, which refers to the C library and nothing else; one that
refers to more is refused here.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.metadata
import struct
import sys
from collections.abc import Callable
from typing import Any, Final

import numpy as np
from llvmlite import binding
from numba import njit, types

from . import instructions, marks, objects
from .marks import Parameter, Signature
from .places import keep

C_LIBRARY: Final = frozenset(
    (
        "clock_gettime", "epoll_wait", "free", "malloc", "memcpy", "memmove", "memset", "poll", "read", "sched_getcpu",
        "sched_yield", "send", "sqrt", "sqrtf", "write",
    )
)  # fmt: skip
"""What machine code may refer to."""

_SYMBOLS: Final = 2
"""The kind of a section of ELF that is a table of symbols."""

_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cpython_wrapper": True}


class NumbaCompiler:
    """Marks functions for Numba, and remembers those that Python calls."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[str, Callable[..., Any], Signature]]] = {}

    def inner(self, function: Callable[..., Any], inline: bool) -> Any:
        """A function that is compiled with those that call it."""
        return njit(inline="always" if inline else "never", **_OPTIONS)(function)

    def compiled(self, function: Callable[..., Any], signature: Signature) -> Any:
        """A function with an entry."""
        made = self.inner(function, inline=False)
        self.entries.setdefault(function.__module__, []).append((function.__name__, made, signature))
        return made

    def instruction(self, name: str) -> Any:
        """What stands for an instruction."""
        return getattr(instructions, name)

    def external(self, name: str, signature: Signature) -> Any:
        """A function of the C library."""
        result = _type(Parameter(signature.results[0])) if signature.results else types.void
        return types.ExternalFunction(name, result(*map(_type, signature.parameters)))


def main() -> None:
    """Compile modules into an open folder: the arguments are its descriptor, and ``MODULE=DIGEST`` for each.

    The digest is that of the text which the caller has; one line on standard error says why it cannot be done.
    """
    folder = int(sys.argv[2])
    compiler = marks.compiler = NumbaCompiler()
    for argument in sys.argv[3:]:
        module, _, digest = argument.partition("=")
        try:
            importlib.import_module(module)
            if objects.digest(module) != digest:
                raise RuntimeError(f"the text in {objects.__file__} is not the caller's: has it just been edited?")
            _keep(folder, module, *_object(compiler.entries[module]))
        except Exception as error:  # whoever waits shows one line
            sys.exit(f"{module}: {type(error).__name__}: {' '.join(str(error).split())}")


def _keep(folder: int, module: str, code: bytes, functions: dict[str, str]) -> None:
    """The object, and then its manifest, so that one without the other is never read."""
    digest = hashlib.sha256(code).hexdigest()
    name = f"{module}-{digest[:16]}.o"
    keep(folder, name, code)
    versions = {package: importlib.metadata.version(package) for package in ("numba", "llvmlite")}
    manifest = {
        "sources": objects.digest(module),
        "processor": objects.processor(),
        "object": [name, digest],
        "library": None,
        "linker": None,
        "functions": functions,
        "made by": versions,
    }
    keep(folder, f"{module}.json", manifest)


def _object(entries: list[tuple[str, Callable[..., Any], Signature]]) -> tuple[bytes, dict[str, str]]:
    """The object of some functions, and by name the symbols of their entries."""
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    whole = binding.parse_assembly("")
    symbols = {}
    for name, function, signature in entries:
        text, inside = _entry(function, signature)
        if not whole.triple:
            whole = binding.parse_assembly(text)
        else:
            whole.link_in(binding.parse_assembly(text))
        symbols[name] = f"syncline_{name}"
        whole.link_in(binding.parse_assembly(_bridge(symbols[name], inside, signature)))
    machine = binding.Target.from_default_triple().create_target_machine(
        cpu=binding.get_host_cpu_name(),
        features=binding.get_host_cpu_features().flatten(),
        opt=3,
        reloc="pic",
        codemodel="default",
    )
    _strip(whole, set(symbols.values()), machine)
    whole.verify()
    code = machine.emit_object(whole)
    if foreign := undefined(code) - C_LIBRARY:
        raise RuntimeError(f"kernels may refer to nothing but {sorted(C_LIBRARY)}, not to {sorted(foreign)}")
    return code, symbols


def undefined(code: bytes) -> set[str]:
    """The symbols that an object of ELF (64 bits, little-endian) needs from elsewhere."""
    (table,), (size, count) = struct.unpack_from("<Q", code, 40), struct.unpack_from("<HH", code, 58)
    sections = [struct.unpack_from("<IIQQQQIIQQ", code, table + size * number) for number in range(count)]
    found = set[str]()
    for _, kind, _, _, begin, nbytes, names, *_ in sections:
        if kind == _SYMBOLS:
            for at in range(begin, begin + nbytes, 24):
                name, _, _, section = struct.unpack_from("<IBBH", code, at)
                if section == 0 and name:
                    first = sections[names][4] + name
                    found.add(code[first : code.index(b"\0", first)].decode())
    return found


def _entry(function: Callable[..., Any], signature: Signature) -> tuple[str, str]:
    """A function that takes the address of its parameters, as LLVM's text, and what Numba calls it."""
    entry = njit(_word_of(signature)(types.int64), **_OPTIONS)(_python_entry(function, signature))
    (made,) = entry.overloads.values()
    return entry.inspect_llvm(entry.signatures[0]), made.fndesc.llvm_func_name


def _word_of(signature: Signature) -> Any:
    return types.float64 if signature.results and signature.results[0].startswith("float") else types.int64


def _python_entry(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """Python text that reads parameters out of memory and calls the function, compiled to Python."""
    words = signature.size
    lines = ["def entry(block):", f" whole, real = view(block, int_, {words}), view(block, real_, {words})"]
    arguments, at = list[str](), 0
    names: dict[str, Any] = {
        "view": instructions.view, "table": instructions.table, "function": function,
        "int_": np.int64(0), "real_": np.float64(0), "np": np,
    }  # fmt: skip
    for item in signature.parameters:
        if item.dims == 0:
            arguments.append(_number(item.element, at))
        else:
            like = f"like_{item.element}"
            names[like] = np.dtype(item.element).type(0)
            sizes = ", ".join(f"whole[{at + 1 + axis}]" for axis in range(item.dims))
            arguments.append(f"{'view' if item.dims == 1 else 'table'}(whole[{at}], {like}, {sizes})")
        at += 1 + item.dims
    call = f"function({', '.join(arguments)})"
    if len(signature.results) > 1:
        lines.append(f" found = {call}")
        lines += [f" whole[{at + place}] = found[{place}]" for place in range(len(signature.results))]
        lines.append(" return 0")
    elif not signature.results:
        lines += [f" {call}", " return 0"]
    else:
        lines.append(f" return {call}")
    exec("\n".join(lines), names)
    return names["entry"]  # type: ignore[no-any-return]


def _number(element: str, at: int) -> str:
    if element == "bool":
        return f"whole[{at}] != 0"
    return f"np.{element}({'real' if element.startswith('float') else 'whole'}[{at}])"


def _bridge(symbol: str, inside: str, signature: Signature) -> str:
    """LLVM's text of a function of C that calls one of Numba's, which writes its result to an address.

    Numba's second address is for an exception, and its own result says whether there is one: there never is.
    """
    word = "double" if _word_of(signature) is types.float64 else "i64"
    return f"""
declare i32 @"{inside}"(ptr, ptr, i64)
define {word} @"{symbol}"(i64 %block) {{
  %result = alloca {word}
  %exception = alloca ptr
  %status = call i32 @"{inside}"(ptr %result, ptr %exception, i64 %block)
  %value = load {word}, ptr %result
  ret {word} %value
}}
"""


def _strip(module: Any, entries: set[str], machine: Any) -> None:
    """Leave the entries and what they need; RuntimeError where that is Numba's runtime or Python's."""
    for function in module.functions:
        if not function.is_declaration and function.name not in entries:
            function.linkage = binding.Linkage.internal
    for variable in module.global_variables:
        if not variable.is_declaration:
            variable.linkage = binding.Linkage.internal
    passes = binding.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, binding.create_pass_builder(machine, binding.create_pipeline_tuning_options()))
    raised = any("picklebuf" in item.name for item in module.global_variables)
    if raised or any(item.name.startswith(("numba_", "NRT_", "Py")) for item in module.functions):
        raise RuntimeError("kernels may neither raise nor allocate")


def _type(parameter: Parameter) -> Any:
    return getattr(types, parameter.element)
