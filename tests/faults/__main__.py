"""``make faults``: run the cells of ``fault_cells`` and print those that do not end as promised.

python tests/faults                 cells in which every pair of values meets
python tests/faults --full          all cells; --results FILE goes on where an earlier run has stopped
python tests/faults --only TEXT     cells whose description contains TEXT
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent)]

from cell_runs import run_cell, warm_pool  # noqa: E402
from fault_cells import Cell, cells, covering  # noqa: E402

from syncline.errors import UsageError  # noqa: E402
from syncline_bench.lab import Lab  # noqa: E402


def main() -> int:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--full", action="store_true")
    asked.add_argument("--only", default="")
    asked.add_argument("--results", type=Path, help="a file of lines of JSON, which is continued")
    given = asked.parse_args()
    chosen = [cell for cell in (cells() if given.full or given.only else covering(cells())) if given.only in str(cell)]
    try:
        with Lab(1):
            pass
    except UsageError as error:
        print(f"without the cells between hosts: {error}")
        chosen = [cell for cell in chosen if cell.transport != "hosts"]
    known = {}
    if given.results is not None and given.results.exists():
        for line in given.results.read_text().splitlines():
            row = json.loads(line)
            known[Cell(*row["cell"])] = row["fault"]
    begun, faults = time.monotonic(), 0
    with warm_pool() as pool:
        for number, cell in enumerate(chosen):
            found = known[cell] if cell in known else run_cell(pool, cell)
            if cell not in known and given.results is not None:
                with given.results.open("a") as file:
                    file.write(json.dumps({"cell": cell, "fault": found}) + "\n")
            if found:
                faults += 1
                print(f"{cell}: {found}", flush=True)
            elif sys.stdout.isatty():
                print(f"\r{number + 1} of {len(chosen)}", end="", flush=True)
    print(f"{len(chosen)} cells, {faults} do not end as promised, {time.monotonic() - begun:.0f} s")
    return faults > 0


if __name__ == "__main__":
    sys.exit(main())
