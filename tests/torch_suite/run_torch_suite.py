"""PyTorch's own tests of process groups on the CPU and of DDP, with the backend gloo and with syncline in its place.

    python tests/torch_suite/run_torch_suite.py --backend gloo --json gloo.json
    python tests/torch_suite/run_torch_suite.py --backend syncline --json syncline.json --beside gloo.json

The tests are those of ``DistributedTest._DistTestBase`` of the installed torch, which needs the package expecttest.
They ask for the backend gloo, and choose by that name what to try: so the second command lets them, and gives them
syncline in its place. It also runs those that torch keeps to MPI, which are for tensors on the CPU: all-to-all.
Four ranks are what the largest of these tests need; torch skips some where there are fewer than eight.
With ``--beside`` the exit status says whether every test that passes with gloo, and every one that torch keeps to MPI,
passes, or stands in ``exceptions.py``.
Ranks are forked, which spares the seconds that importing torch takes in each.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import re
import sys
import time
import unittest
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

WORLD = 4
MPI_ALONE = "Only MPI supports "
"""How the reasons begin for which torch skips what syncline has and gloo has not."""


def main() -> int:
    asked = _arguments()
    os.environ.update(BACKEND="gloo", WORLD_SIZE=str(asked.ranks), OMP_NUM_THREADS="1", MASTER_ADDR="127.0.0.1")
    os.environ.setdefault("TEMP_DIR", "/tmp")
    os.environ.setdefault("DISTRIBUTED_TESTS_DEFAULT_TIMEOUT", str(asked.limit))
    if asked.backend == "syncline":
        _stand_in()
    case = _case()
    if asked.backend == "syncline":
        _run_those_of_mpi(case)
    found: dict[str, list[str]] = {}
    names = [name for name in unittest.TestLoader().getTestCaseNames(case) if re.search(asked.only, name)]
    for name in names:
        begun = time.perf_counter()
        outcome, why = _run(case, name)
        found[name] = [outcome, why]
        print(
            f"{outcome:8} {time.perf_counter() - begun:6.1f} s  {name}  {why.splitlines()[-1] if why else ''}",
            flush=True,
        )
    print(dict(collections.Counter(outcome for outcome, _ in found.values())))
    if asked.json:
        Path(asked.json).write_text(json.dumps(found, indent=1))
    return _compare(found, asked.beside) if asked.beside else 0


def _arguments() -> Any:
    parser = argparse.ArgumentParser(description="PyTorch's tests of process groups, with gloo or with syncline")
    parser.add_argument("--backend", choices=("gloo", "syncline"), default="syncline")
    parser.add_argument("--only", default="", help="a regular expression that names of tests have to match")
    parser.add_argument("--ranks", type=int, default=WORLD)
    parser.add_argument("--limit", type=int, default=120, help="seconds for one test")
    parser.add_argument("--json", help="where outcomes are written")
    parser.add_argument("--beside", help="outcomes with gloo, to compare with")
    return parser.parse_args()


def _stand_in() -> None:
    """From now on whoever asks torch for gloo gets syncline."""
    import torch.distributed as dist

    from syncline.torch_backend import register

    register()
    for name in ("init_process_group", "new_group"):
        original = getattr(dist.distributed_c10d, name)

        def translated(*arguments: Any, _original: Any = original, **options: Any) -> Any:
            given = ["syncline" if argument == "gloo" else argument for argument in arguments]
            if options.get("backend") == "gloo":
                options["backend"] = "syncline"
            return _original(*given, **options)

        setattr(dist, name, translated)
        setattr(dist.distributed_c10d, name, translated)


def _case() -> type[unittest.TestCase]:
    import torch.multiprocessing
    from torch.testing._internal import common_distributed
    from torch.testing._internal.common_distributed import MultiProcessTestCase

    common_distributed.skip_if_small_worldsize = lambda test: test  # eight ranks, where tests use the first three
    from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend

    class Case(TestDistBackend, DistributedTest._DistTestBase):  # type: ignore[misc]
        def setUp(self) -> None:
            super().setUp()
            MultiProcessTestCase._start_processes(self, torch.multiprocessing.get_context("fork").Process)

    return Case


def _run_those_of_mpi(case: type[unittest.TestCase]) -> None:
    """Take the mark off them by which unittest skips them."""
    for name in unittest.TestLoader().getTestCaseNames(case):
        test = getattr(case, name)
        if getattr(test, "__unittest_skip_why__", "").startswith(MPI_ALONE):
            test.__unittest_skip__ = False


def _run(case: type[unittest.TestCase], name: str) -> tuple[str, str]:
    result = unittest.TestResult()
    unittest.TestSuite([case(name)]).run(result)
    if result.skipped:
        return "skipped", result.skipped[0][1]
    for _, trace in (*result.errors, *result.failures):
        return "failed", trace
    return "passed", ""


def _compare(found: dict[str, list[str]], beside: str) -> int:
    from exceptions import EXCEPTIONS

    gloo = json.loads(Path(beside).read_text())
    missing = [
        name
        for name, (outcome, why) in gloo.items()
        if (outcome == "passed" or why.startswith(MPI_ALONE))
        and name in found
        and found[name][0] != "passed"
        and name not in EXCEPTIONS
    ]
    print(*(f"should pass and does not: {name}" for name in missing), sep="\n")
    return len(missing) > 0


if __name__ == "__main__":
    sys.exit(main())
