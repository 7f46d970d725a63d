"""What all tests share: the order in which they run, what is compiled before, and the fixtures."""

from __future__ import annotations

import gc
import logging
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from _pytest.assertion import rewrite
from hypothesis import settings

from threads import run_group, run_sessions

# A machine may be busy: how long an example takes says nothing. Other examples are drawn in every run.
settings.register_profile("syncline", deadline=None, max_examples=50)
settings.load_profile("syncline")

# Without a GPU its kernels run in Triton's interpreter; Triton wants to know before it is imported.
if not any(Path("/dev").glob("nvidia[0-9]*")):
    os.environ["TRITON_INTERPRET"] = "1"

# Several processes run tests at once, as many as the cores can take: further threads would only turn in waiting for
# each other. Those processes begin with it.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Choosing by measuring takes a second per start: only its own tests do it. Processes of tests inherit it.
os.environ["SYNCLINE_TUNING"] = "off"

# A run that fails would write its flight record into the current folder: the record's own tests name a file.
os.environ["SYNCLINE_FLIGHT"] = "off"


# The longest files first, so that all workers end at about the same time; before the others, those that wait for
# processes rather than compute, which leave the cores to those that compute.
FIRST = (
    "trainers/test_jax.py",
    "trainers/test_tensorflow.py",
    "trainers/test_jax_limits",
    "trainers/test_tensorflow_limits",
    "trainers/test_compared",
    "trainers/test_keras",
    "trainers/test_ray",
    "trainers/",
    "parallel/test_failures",
    "parallel/test_torch_backend",
    "bench/test_frameworks",
    "parallel/test_libraries",
    "contracts/test_transports",
    "bench/test_bench_ranks",
    "parallel/test_examples",
    "parallel/test_launched",
    "bench/test_compare_digits",
    "parallel/",
    "bench/",
    "benchmarks/",
    "lab/",
    "workloads/",
)


MET: Counter[str] = Counter()
"""How many cases of a test have been collected."""
LIBRARY = re.compile(r"\[.*\b(grpc|ucx|mpi|openmpi|mpich|tls)\b")
CORES = len(os.sched_getaffinity(0))
KERNELS = ("sparse", "onesided", "cast", "stochastic", "low_rank", "signs", "ternary", "linear")


def pytest_configure(config: pytest.Config) -> None:
    """Before several processes begin: compile kernels on a new machine, and tests in a new clone, once for all of them.

    A process that runs tests has its own children begin with ``children/sitecustomize.py``.
    """
    if getattr(config.option, "numprocesses", None) and not hasattr(config, "workerinput"):
        with ThreadPoolExecutor(CORES) as threads:
            list(threads.map(compile_kernels, KERNELS))
        compile_tests(config)
    else:
        path = [str(Path(__file__).with_name("children")), os.environ.get("PYTHONPATH")]
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, path))


def compile_kernels(module: str) -> None:
    """Import a module of kernels in a process of its own; what is wrong with it is for its tests to say."""
    subprocess.run([sys.executable, "-c", f"import syncline.kernels.{module}"], timeout=600, check=False)


def compile_tests(config: pytest.Config) -> None:
    """Store all tests with their assertions rewritten, unless pytest has stored some already, or may not."""
    root = Path(__file__).parent
    if sys.dont_write_bytecode or any(root.glob("*/__pycache__/test_*-pytest-*.pyc")):
        return
    paths = sorted([*root.rglob("test_*.py"), *root.rglob("*/conftest.py")])
    fork = get_context("fork").Process  # whose arguments need not be pickled
    processes = [fork(target=rewrite_tests, args=(config, paths[core::CORES])) for core in range(CORES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(600)


def rewrite_tests(config: pytest.Config, paths: Sequence[Path]) -> None:
    """Do what pytest does when it imports these files, and import none. All of them take a core ten seconds."""
    state = config.stash[rewrite.assertstate_key]
    for path in paths:
        folder = rewrite.get_cache_dir(path)
        if rewrite.try_makedirs(folder):
            source, code = rewrite._rewrite_test(path, config)
            rewrite._write_pyc(state, code, source, folder / f"{path.stem}{rewrite.PYC_TAIL}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Of a test that says ``every(n)``, leave all cases but one of n to ``make test-all``.

    A case stays if the digits of its number in base n add up to a multiple of n. These numbers have no period, so what
    stays has all values of parameters that take turns or are combined. Of a test that says ``beyond(n)``, leave
    the first n cases to ``make test-all`` and the others to ``make test-deep``.
    """
    if every := item.get_closest_marker("every"):
        name, (n,) = item.nodeid.partition("[")[0], every.args
        number, digits = MET[name], 0
        while number:
            number, digit = divmod(number, n)
            digits += digit
        if digits % n:
            item.add_marker("slow")
        MET[name] += 1
    if beyond := item.get_closest_marker("beyond"):
        name, (n,) = item.nodeid.partition("[")[0], beyond.args
        item.add_marker("slow" if MET[name] < n else "deep")
        MET[name] += 1


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let those of ``FIRST`` begin; the files of each keep their order. Tests from elsewhere are the last.

    Slow are the trainers' tests, and contracts and processes over message libraries that few have installed.
    """
    root = Path(__file__).parent

    def place(item: pytest.Item) -> int:
        if not item.path.is_relative_to(root):
            return len(FIRST) + 1
        name = item.path.relative_to(root).as_posix()
        return next((place for place, start in enumerate(FIRST) if name.startswith(start)), len(FIRST))

    items.sort(key=place)
    for item in items:
        folder = item.path.relative_to(root).parts[0] if item.path.is_relative_to(root) else ""
        over_library = folder in ("contracts", "parallel") and LIBRARY.search(item.name)
        if folder == "trainers" or over_library:
            item.add_marker("slow")


def pytest_collection_finish() -> None:
    """What has been imported and collected stays: no search for garbage has to go through it again and again.

    pytest listens to each logger that does not propagate, six times a test, and PyTorch has fifty: the root hears them.
    """
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "torch"]:
        logging.getLogger(name).propagate = True
    gc.collect()
    gc.freeze()


@pytest.fixture
def compiling() -> Iterator[None]:
    """For tests that compile: where anything of a process is compiled, models of later tests are taken for compiled."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


@pytest.fixture
def run_on() -> Callable[..., list[Any]]:
    """``run_sessions``."""
    return run_sessions


@pytest.fixture(scope="session")
def group() -> Callable[..., list[Any]]:
    """``run_group``."""
    return run_group
