"""What run starts, and with which status it ends."""

from __future__ import annotations

from pathlib import Path

import pytest
from calling import call


def test_run_starts_the_script_and_takes_over_its_status(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os, sys\n"
        "names = ('SYNCLINE_PROCESS', 'RANK', 'WORLD_SIZE', 'SYNCLINE_SERVERS', 'SYNCLINE_STRATEGY')\n"
        "line = ' '.join([os.environ[name] for name in names] + sys.argv[1:])\n"
        "os.write(1, (line + '\\n').encode())\n"  # in one piece: all processes write to one file
        "sys.exit(int(sys.argv[1]) if os.environ['SYNCLINE_PROCESS'] == '1' else 0)\n"
    )
    result = call("run", "-n", "2", "--strategy", "ps", str(script), "5", "--lr", "-n", "3")
    output = capfd.readouterr()
    assert sorted(output.out.splitlines()) == [
        f"{process} {min(process, 1)} 2 1 ps(servers=1) 5 --lr -n 3" for process in range(3)
    ]
    assert result.exit_code == 5
    assert result.output == "syncline: rank 1 ended with status 5\n"


def test_run_takes_a_module(capfd: pytest.CaptureFixture[str]) -> None:
    assert call("run", "-n", "1", "-m", "calendar", "2020", "2").exit_code == 0
    assert "February 2020" in capfd.readouterr().out
