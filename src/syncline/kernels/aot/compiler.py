"""Compiles kernels with Numba into object files, in the process that ``objects`` starts.

Kernels are compiled without Numba's runtime, so they can neither allocate arrays nor raise, and need nothing of Python
or Numba when they run. The kernels of a module become one object, each with an entry that takes the address of a block
of parameters (``compiled``). An object may refer to a few functions of the C library; the compiler refuses any other.
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
from llvmlite import binding, ir
from numba import njit, types
from numba.extending import intrinsic
from numba.np.arrayobj import make_array, populate_array

from . import compiled, objects
from .compiled import Parameter, Signature

C_LIBRARY: Final = frozenset(
    (
        "clock_gettime", "epoll_wait", "free", "malloc", "memcpy", "memmove", "memset", "poll", "read", "sched_getcpu",
        "sched_yield", "send", "sqrt", "sqrtf", "write",
    )
)  # fmt: skip
"""The functions that machine code may refer to."""

_SYMBOLS: Final = 2
"""SHT_SYMTAB: the type of an ELF section that is a symbol table."""

# error_model "numpy": a division by zero gives an infinity or NaN, where Python's model would raise.
_OPTIONS: Final[dict[str, Any]] = {"nogil": True, "error_model": "numpy", "_nrt": False, "no_cpython_wrapper": True}

_WORD: Final = ir.IntType(64)


class NumbaCompiler:
    """Hands marked functions to Numba and records, for each module, the kernels that need an entry."""

    def __init__(self) -> None:
        self.entries: dict[str, list[tuple[str, Callable[..., Any], Signature]]] = {}

    def inner(self, function: Callable[..., Any], inline: bool) -> Any:
        """Compile a function together with the kernels that call it."""
        return njit(inline="always" if inline else "never", **_OPTIONS)(function)

    def compiled(self, function: Callable[..., Any], signature: Signature) -> Any:
        """Compile a kernel and give it an entry."""
        made = self.inner(function, inline=False)
        self.entries.setdefault(function.__module__, []).append((function.__name__, made, signature))
        return made

    def instruction(self, name: str) -> Any:
        """The implementation of a declaration in ``native``."""
        return _INSTRUCTIONS[name]

    def external(self, name: str, signature: Signature) -> Any:
        """Declare a function of the C library."""
        result = _type(Parameter(signature.results[0])) if signature.results else types.void
        return types.ExternalFunction(name, result(*map(_type, signature.parameters)))


def main() -> None:
    """Compile modules into an open folder. Arguments: the folder's descriptor, then ``MODULE=DIGEST`` for each module.

    The digest is of the source text which the caller has read. A failure prints one line on standard error.
    """
    folder = int(sys.argv[2])
    compiler = compiled.compiler = NumbaCompiler()
    for argument in sys.argv[3:]:
        module, _, digest = argument.partition("=")
        try:
            importlib.import_module(module)
            if objects.digest(module) != digest:  # else later processes would trust code of another text
                raise RuntimeError(f"the text beside {objects.__file__} is not the caller's: has it just been edited?")
            _keep(folder, module, *_object(compiler.entries[module]))
        except Exception as error:  # the process that waits reports one line
            sys.exit(f"{module}: {type(error).__name__}: {' '.join(str(error).split())}")


def _keep(folder: int, module: str, code: bytes, functions: dict[str, str]) -> None:
    """Write the object before its manifest: a reader that finds the manifest then finds the object too."""
    digest = hashlib.sha256(code).hexdigest()
    name = f"{module}-{digest[:16]}.o"
    objects.keep(folder, name, code)
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
    objects.keep(folder, f"{module}.json", manifest)


def _object(entries: list[tuple[str, Callable[..., Any], Signature]]) -> tuple[bytes, dict[str, str]]:
    """Compile kernels into one object; return it and the symbol of each kernel's entry."""
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
    """The undefined symbols of an ELF object (64 bits, little-endian)."""
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
    """A kernel's entry as LLVM assembly, and the name that Numba gave it."""
    entry = njit(_word_of(signature)(types.int64), **_OPTIONS)(_python_entry(function, signature))
    (made,) = entry.overloads.values()
    return entry.inspect_llvm(entry.signatures[0]), made.fndesc.llvm_func_name


def _word_of(signature: Signature) -> Any:
    return types.float64 if signature.results and signature.results[0].startswith("float") else types.int64


def _python_entry(function: Callable[..., Any], signature: Signature) -> Callable[..., Any]:
    """A Python function that reads the parameters of a block and calls the kernel; Numba compiles it."""
    words = signature.size
    lines = ["def entry(block):", f" whole, real = view(block, int_, {words}), view(block, real_, {words})"]
    arguments, at = list[str](), 0
    names: dict[str, Any] = {
        "view": view, "table": table, "function": function,
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
    """LLVM assembly of a C function that calls Numba's, which returns a status and writes its result to an address.

    The status and the second address tell of exceptions, which kernels cannot raise.
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
    """Remove all that no entry needs; RuntimeError if an entry needs the runtime of Numba or Python."""
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
        raise RuntimeError(
            "kernels may neither raise nor allocate: give every range() a step that cannot be 0, such as max(block, 1),"
            " and let the caller pass arrays in"
        )


def _type(parameter: Parameter) -> Any:
    return getattr(types, parameter.element)


# The declarations in ``native`` say what each of these does.


@intrinsic
def view(typing: Any, address: Any, like: Any, size: Any) -> Any:  # noqa: ARG001, D103
    return _array(address, like, [size])


@intrinsic
def table(typing: Any, address: Any, like: Any, rows: Any, columns: Any) -> Any:  # noqa: ARG001, D103
    return _array(address, like, [rows, columns])


def _array(address: Any, like: Any, sizes: list[Any]) -> Any:
    # numba.carray returns the array from a function of its own, which code without Numba's runtime cannot do.
    made = types.Array(like, len(sizes), "C")

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        element = context.get_data_type(like)
        itemsize = context.get_constant(types.intp, context.get_abi_sizeof(element))
        array = make_array(made)(context, builder)  # type: ignore[no-untyped-call]
        shape, strides = args[2:], [itemsize]
        for extent in reversed(shape[1:]):
            strides.insert(0, builder.mul(extent, strides[0]))
        data = builder.inttoptr(args[0], element.as_pointer())
        populate_array(array, data=data, shape=shape, strides=strides, itemsize=itemsize, meminfo=None)  # type: ignore[no-untyped-call]
        return array._getvalue()

    return made(address, like, *sizes), generate


@intrinsic
def load(typing: Any, address: Any) -> Any:  # noqa: ARG001, D103
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.load_atomic(builder.inttoptr(args[0], _WORD.as_pointer()), "acquire", 8)

    return types.int64(types.int64), generate


@intrinsic
def store(typing: Any, address: Any, value: Any) -> Any:  # noqa: ARG001, D103
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.store_atomic(args[1], builder.inttoptr(args[0], _WORD.as_pointer()), "release", 8)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@intrinsic
def add(typing: Any, address: Any, value: Any) -> Any:  # noqa: ARG001, D103
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.atomic_rmw("add", builder.inttoptr(args[0], _WORD.as_pointer()), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def fence(typing: Any) -> Any:  # noqa: ARG001, D103
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        builder.fence("seq_cst")
        return context.get_dummy_value()

    return types.void(), generate


@intrinsic
def float_of_bits(typing: Any, bits: Any) -> Any:  # noqa: ARG001, D103
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.FloatType())

    return types.float32(types.uint32), generate


@intrinsic
def bits_of_float(typing: Any, value: Any) -> Any:  # noqa: ARG001, D103
    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:  # noqa: ARG001
        return builder.bitcast(args[0], ir.IntType(32))

    return types.uint32(types.float32), generate


_INSTRUCTIONS: Final[dict[str, Any]] = {
    "view": view, "table": table, "load": load, "store": store, "add": add, "fence": fence,
    "float_of_bits": float_of_bits, "bits_of_float": bits_of_float,
}  # fmt: skip
