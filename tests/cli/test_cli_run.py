"""What run starts, and with which status it ends."""

from __future__ import annotations

import importlib.util
import re
import socket
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


def test_checks_reach_the_ranks_as_variables(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import os\nprint(*(os.environ.get(f'SYNCLINE_{name}') for name in ('CHECK_REPLICAS', 'CHECK_FINITE')))"
    )
    assert call("run", "-n", "1", "--check-replicas", "5", "--check-finite", "warn", str(script)).exit_code == 0
    assert call("run", "-n", "1", str(script)).exit_code == 0
    assert capfd.readouterr().out == "5 warn\nNone None\n"


needs_library = pytest.mark.skipif(
    importlib.util.find_spec("prometheus_client") is None, reason="prometheus-client is not installed"
)


@needs_library
@pytest.mark.slow
def test_metrics_of_a_run_are_shown_by_top_and_a_taken_port_ends_it_before_its_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two ranks; the port that is taken is the second one's."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    script = tmp_path / "train.py"
    script.write_text(
        "import subprocess, sys, numpy as np, syncline\n"
        "class Rule:\n    def update(self, weights, gradient, state): weights -= gradient\n"
        "syncline.init()\n"
        "_, optimizer = syncline.prepare({'w': np.zeros(9, np.float32)}, Rule())\n"
        "for _ in range(5): optimizer.step({'w': np.ones(9, np.float32)})\n"
        "if syncline.rank() == 0: subprocess.run([sys.executable, '-m', 'syncline', 'top'], check=True)\n"
        "syncline.barrier()\nprint('trained')\n"
    )
    assert call("run", "-n", "2", "--metrics", "0", str(script)).exit_code == 0
    shown = capfd.readouterr()
    assert len(re.findall(r"metrics at http://127\.0\.0\.1:\d+/metrics$", shown.err, re.MULTILINE)) == 2
    assert re.search(r"2 workers, .*\nrank step .*\n0 +5 .*\n1 +5 ", shown.out)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        ended = call("run", "-n", "2", "--metrics", str(port - 1), str(script))
    assert ended.exit_code == 1
    shown = capfd.readouterr()
    assert re.search(
        rf"rank 1 \(.*\) cannot serve metrics at 127\.0\.0\.1:{port} \(Address already in use\)", shown.err
    )
    assert "trained" not in shown.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["-n", "2", "--elastic", "3"], "--elastic 3 needs 3 workers, more than -n 2 starts"),
        (["-n", "2", "--elastic", "3:3"], "--elastic 3:3 needs 3 workers, more than -n 2 starts"),
        (["-n", "4", "--elastic", "4:2"], "--elastic 4:2 allows 2 workers at once, fewer than -n 4 starts"),
        (["-n", "3", "--elastic", "1:2"], "--elastic 1:2 allows 2 workers at once, fewer than -n 3 starts"),
        *((["-n", "2", "--elastic", text], "is not LEAST or LEAST:MOST") for text in ("0:2", "0", "1:", ":2", "two")),
        (["-n", "2", "--servers", "1", "--elastic", "1"], "use 'ps(servers=1, on=workers, replicas=1)'"),
        (["-n", "2", "--strategy", "ps(servers=2)", "--elastic", "1"], "use 'ps(servers=2, replicas=1)'"),
        (["-n", "2", "--strategy", "ps", "--elastic", "1:2"], "use 'ps(servers=1, on=workers, replicas=1)'"),
        (
            ["-n", "2", "--strategy", "ps(servers=1, on=workers) sync=asp", "--elastic", "1"],
            "with server processes, or replicas=1, if each worker goes at its own pace, not with",
        ),
        (["-n", "1", "--samples", "/nowhere/samples.jsonl"], "there is no folder /nowhere for samples.jsonl"),
    ],
)
def test_run_refuses_what_cannot_work(tmp_path: Path, options: list[str], words: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("raise SystemExit('started')")
    result = call("run", *options, str(script))
    assert result.exit_code
    assert words in result.output


@pytest.mark.parametrize("option", [["--elastic", "1"], []])
def test_run_goes_on_without_a_worker_and_names_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: list[str]
) -> None:
    if not option:
        monkeypatch.setenv("SYNCLINE_ELASTIC", "1")
    script, log = tmp_path / "train.py", tmp_path / "samples.jsonl"
    script.write_text(
        "import os, sys\n"
        "os.write(int(os.environ['SYNCLINE_ELASTIC'].split(':')[0]), b'{\"begun\": 1}')\n"
        "os.write(1, os.environ['SYNCLINE_SAMPLES'].encode() + b'\\n')\n"
        "sys.exit(int(os.environ['RANK']))\n"
    )
    log.write_text("of an earlier run")
    result = call("run", "-n", "2", *option, "--samples", str(log), str(script))
    assert result.exit_code == 0
    assert result.output == "syncline: rank 1 ended with status 1; the run went on\n"
    assert capfd.readouterr().out.splitlines() == [str(log)] * 2
    assert log.read_text() == ""


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("weights", "line 1 of LOG was not written by syncline run --samples"),
        ('{"epoch": 0}\n', "line 1 of LOG was not written by syncline run --samples"),
        (
            '{"sampler": 1, "members": [0], "view": 1, "nodes": [], "strategy": "", "algorithms": [], "epoch": 0,'
            ' "step": 0, "samples": []}',
            "LOG has the steps of several samplers",
        ),
    ],
)
def test_repeat_refuses_what_is_no_log_of_one_sampler(tmp_path: Path, text: str, words: str) -> None:
    script, log = tmp_path / "train.py", tmp_path / "samples.jsonl"
    script.write_text("raise SystemExit('started')")
    log.write_text(text)
    result = call("repeat", str(log), str(script))
    assert result.exit_code
    assert words.replace("LOG", str(log)) in result.output
