"""``make fuzz``: a million inputs for all parsers of ``parsers``, and those that are neither parsed nor refused.

python tests/fuzz --inputs 1000000 --seed 0 --only TEXT     parsers whose name contains TEXT
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

_TESTS = Path(__file__).parent.parent
sys.path[:0] = [str(_TESTS / name) for name in ("fuzz", "", "contracts", "explain", "wire")]

from fuzzing import Fault, fuzz  # noqa: E402
from parsers import PARSERS, Parser  # noqa: E402


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--inputs", type=int, default=1_000_000)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument("--only", default="")
    given = asked.parse_args()
    chosen = [parser for parser in PARSERS if given.only in parser.name]
    if not chosen:
        asked.error(f"no parser has {given.only!r} in its name")
    share = given.inputs / sum(parser.weight for parser in chosen)
    faults = total = 0
    for parser in chosen:
        begun, count = time.monotonic(), round(share * parser.weight)
        found = _apart(parser, count, given.seed)
        total, faults = total + count, faults + len(found)
        took_s = time.monotonic() - begun
        print(f"{parser.name:24} {count:8} inputs {took_s:7.1f} s {len(found):3} faults", flush=True)
        for fault in found:
            print(f"  {fault}", flush=True)
    print(f"{total} inputs for {len(chosen)} parsers, {faults} faults")
    return faults > 0


def _apart(parser: Parser, count: int, seed: int) -> list[str]:
    """Fuzz in a child, which may crash."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(reader)
            found: list[Fault] = fuzz(parser, count, seed)
            with os.fdopen(writer, "w") as file:
                file.write("\0".join(map(str, found)))
            sys.exit(0)
        finally:
            sys.stdout.flush()
    os.close(writer)
    with os.fdopen(reader) as file:
        told = file.read()
    _, status = os.waitpid(pid, 0)
    found = [line for line in told.split("\0") if line]
    return found + ([f"the process ends with status {os.waitstatus_to_exitcode(status)}"] if status else [])


if __name__ == "__main__":
    sys.exit(main())
