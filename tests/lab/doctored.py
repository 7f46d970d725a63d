"""``syncline doctor`` with a clock that is ahead by SECONDS on the rank RANK: doctored.py RANK SECONDS ARGUMENTS..."""

from __future__ import annotations

import os
import sys
import time

from syncline_bench.cli import main
from syncline_bench.doctor import hosts

rank, seconds, *arguments = sys.argv[1:]
if os.environ["SYNCLINE_PROCESS"] == rank:
    hosts.wall_clock = lambda: time.time() + float(seconds)
sys.argv[1:] = ["doctor", *arguments]
main()
