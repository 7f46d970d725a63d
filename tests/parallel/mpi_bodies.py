"""A rank under mpirun that does, one after the other, what ranks of the pool do each in a process of their own.

Arguments: a folder for results (``RANK.N`` is what was sent last in the Nth part, pickled), and JSON: a list of
[function of rank_bodies or host_bodies, arguments after the place]. Every process meets at a store of its own choice:
none is given.
"""

from __future__ import annotations

import json
import pickle
import sys
from pathlib import Path
from typing import Any

import host_bodies
import rank_bodies
import torch

import syncline
from syncline.launch.environment import recognise


class Line:
    """What a part sends; the last of it is kept."""

    last: Any = None

    def send(self, value: Any) -> None:
        self.last = value


def main(folder: str, parts: list[list[Any]]) -> None:
    torch.set_num_threads(1)
    found = recognise()
    init = syncline.init
    rank_bodies.syncline.init = lambda strategy, **_: init(strategy)  # type: ignore[assignment]
    for number, (name, *arguments) in enumerate(parts):
        line = Line()
        body = getattr(rank_bodies, name, None) or getattr(host_bodies, name)
        body(line, (found.rank, found.world, ""), *arguments)
        Path(folder, f"{found.rank}.{number}").write_bytes(pickle.dumps(line.last))


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
