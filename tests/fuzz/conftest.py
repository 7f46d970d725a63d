"""What the registry of parsers takes from the tests of other folders."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path += [str(Path(__file__).parent.parent / name) for name in ("contracts", "explain", "wire")]
