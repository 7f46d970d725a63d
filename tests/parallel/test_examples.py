"""Every example runs as its head says and ends well; ``spawn.py`` does so among the tests of launchers.

So does every lesson of the tutorials: its scripts are saved, its changes made, its commands called, and they print what
the page shows.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import rank_bodies as bodies

from pool import Pool

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LIMIT_S = 120.0
LESSONS = EXAMPLES.parent / "docs" / "tutorials"
FIRST, SURVIVE = LESSONS / "first-run.md", LESSONS / "survive.md"


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    """One that has loaded what the examples take their data from, which takes a second."""
    found = Pool(Path(__file__).parent, "rank_bodies", "sklearn.datasets")
    yield found
    found.close()


@pytest.mark.slow
def test_training_script() -> None:
    """By the launcher, with all of torch; without a strategy it runs in the tests of launchers, under torchrun."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"}
    environment.pop("SYNCLINE_STRATEGY", None)
    options = ["-n", "2", "--strategy", "ps(servers=1, on=workers) transport=tcp"]
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "run", *options, str(EXAMPLES / "train.py")],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=environment,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    strategy, _, right = done.stdout.strip().partition(": ")
    assert strategy.startswith("ps(servers=1, on=workers)")
    assert float(right.partition("%")[0]) > 80


def printed(pool: Pool, address: str, processes: int, script: str, *arguments: str) -> str:
    """What rank 0 prints of a script that all run, as processes of a launcher."""
    case = [[[index, processes, address], str(EXAMPLES / script), *arguments] for index in range(processes)]
    with pool.start(bodies.runs_script, case) as group:
        group.results(LIMIT_S)
        assert not any("Traceback" in rank.printed() for rank in group.ranks)
        return group.ranks[0].printed()


@pytest.mark.slow
def test_own_strategy(pool: Pool, address: str) -> None:
    found = printed(pool, address, 2, "own_strategy.py")
    assert "trained with ring schedule=even(count=3) transport=shm, 2 workers" in found
    assert "the nearest that works is 'ps(servers=1)'" in found


def test_own_algorithm(pool: Pool, address: str) -> None:
    found = printed(pool, address, 1, "own_algorithm.py")
    assert "the contributions of ranks 0-2 missing" in found
    assert float(found.split()[-1]) < 1e-12


def test_own_codec(pool: Pool, address: str) -> None:
    strategy, _, right = printed(pool, address, 2, "own_codec.py").strip().partition(": ")
    assert "codec=feedback(upper)" in strategy
    assert float(right.partition("%")[0]) > 80


def test_checkpoint(pool: Pool, address: str, tmp_path: Path) -> None:
    """A run that is resumed ends with the weights of one that was not interrupted."""
    whole = printed(pool, address, 2, "checkpoint.py", str(tmp_path))
    saved = sorted(tmp_path.iterdir())
    assert [path.name.rpartition("-")[0] for path in saved] == [f"step-{number}" for number in range(1, 5)]
    for path in saved[2:]:
        shutil.rmtree(path)
    resumed = printed(pool, address, 2, "checkpoint.py", str(tmp_path))
    assert whole.startswith("from epoch 0 to 4: ")
    assert resumed.startswith("from epoch 2 to 4: ")
    assert whole.partition(": ")[2] == resumed.partition(": ")[2]


@pytest.mark.slow
def test_asynchronous(pool: Pool, address: str) -> None:
    """Which worker trains on which image is a matter of time; each is trained on once in every epoch."""
    found = printed(pool, address, 2, "asynchronous.py").strip()
    assert "all together 17280: " in found
    assert float(found.rpartition(": ")[2].partition("%")[0]) > 80


def test_elastic(pool: Pool, address: str) -> None:
    """Without losses; ``test_elastic`` has those of a run under its launcher."""
    found = printed(pool, address, 2, "elastic.py").splitlines()[-1]
    assert found.startswith("2 workers at the end: ")
    assert float(found.partition(": ")[2].partition("%")[0]) > 80


@pytest.mark.slow
def test_large_batch(pool: Pool, address: str) -> None:
    batch, _, right = printed(pool, address, 2, "large_batch.py").strip().partition(": ")
    assert batch == "batches of 120"
    assert float(right.partition("%")[0]) > 80


@pytest.mark.slow
@pytest.mark.parametrize(
    ("script", "what"),
    [
        ("pipeline_by_data.py", "2 stages x 2 replicas"),
        pytest.param("tensor_by_data.py", "2 halves x 2 replicas", marks=pytest.mark.slow),
    ],
)
def test_data_parallelism_beside_another_one(pool: Pool, address: str, script: str, what: str) -> None:
    """The weights are those of one process."""
    strategy, largest = printed(pool, address, 4, script).strip().splitlines()
    assert strategy.endswith(f": {what}")
    assert float(largest.removeprefix("largest difference from one process: ")) < 1e-9


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "strategy"),
    [
        (["-n", "2"], "ring codec=topk(ratio=0.1)"),
        (["-n", "2", "--servers", "1"], "ps(servers=1) codec=int8"),
    ],
)
def test_numpy_loop_without_torch(tmp_path: Path, options: list[str], strategy: str) -> None:
    """Where a framework that is not there would be imported, the script ends with that error."""
    for name in ("torch", "numba", "jax", "tensorflow"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not installed')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    script = [str(EXAMPLES / "numpy_loop.py"), strategy]
    done = subprocess.run(
        [sys.executable, "-m", "syncline", "run", *options, *script],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    ran, _, loss = done.stdout.strip().partition(": loss ")
    assert "codec=feedback" in ran
    assert float(loss) < 0.4


# The tutorials. Blocks of Markdown: ``python`` and ``diff`` begin with the name of the script to save or to change,
# ``console`` has commands after a dollar sign, each with what it prints; a line with three dots stands for any lines.

BLOCK = re.compile(r"^```(python|diff|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LONG = re.compile(r"syncline (accuracy|bench|calibrate|compare|doctor|tune)\b|\. ")
"""Commands that measure, which the tests of the command line call, and the one that enters an environment."""
VARYING = re.compile(
    r"(?P<chosen>^.*schedule=.+)|(?P<number>\d[\d,.]*)|(?P<limit> +(bandwidth|compute)$)|(?P<space> +)"
)
ALIKE = {"chosen": r".*schedule=.+", "number": r"[\d,.]+", "limit": r"\s+(?:bandwidth|compute)", "space": r"\s+"}
"""What differs between runs or machines, and what takes its place: the strategy that a run chooses, and figures."""


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text())


def save(kind: str, text: str, folder: Path) -> None:
    """A script, or all changes of a diff, each of which fits into one place of it."""
    head, _, body = text.partition("\n")
    script = folder / head.split()[-1]
    if kind == "python":
        script.write_text(text)
        return
    old = script.read_text()
    for change in body.split("@@\n"):
        lines = change.splitlines()
        before, after = ("".join(f"{line[1:]}\n" for line in lines if not line.startswith(sign)) for sign in "+-")
        assert old.count(before) == 1, f"not one place in {script.name}:\n{before}"
        old = old.replace(before, after)
    script.write_text(old)


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Each with the text that the page shows after it."""
    lines = text.splitlines()
    starts = [number for number, line in enumerate(lines) if line.startswith("$ ")]
    for start, end in pairwise([*starts, len(lines)]):
        yield lines[start][2:], "\n".join(lines[start + 1 : end])


def alike(line: str) -> str:
    """A pattern for a line of a page."""
    if line == "...":
        return r"(?:.*\n)*?"
    found, end = "", 0
    for match in VARYING.finditer(line.rstrip()):
        found += re.escape(line[end : match.start()]) + ALIKE[str(match.lastgroup)]
        end = match.end()
    return rf"{found}{re.escape(line[end:].rstrip())}\s*\n"


def check_printed(command: str, printed: str, shown: str) -> None:
    pattern = "".join(map(alike, shown.splitlines()))
    assert re.fullmatch(pattern, f"{printed.rstrip()}\n"), f"{command}\nprinted\n{printed}\nthe page shows\n{shown}"


def call(pool: Pool, address: str, command: str, folder: Path, *, fails: bool) -> str:
    """What a command prints whose processes are ranks of the pool."""
    words = shlex.split(command)
    environ = dict(words.pop(0).split("=") for word in words[:1] if "=" in word)
    program = words.pop(0)
    options = {"-n": "1", "--servers": "0", "--strategy": ""}
    if words[0] == "run":
        program, words = "python", words[1:]
        while words[0] in options:
            options[words[0]] = words[1]
            words = words[2:]
    processes = int(options["-n"]) + int(options["--servers"])
    strategy = options["--strategy"] or ("ps" if processes > int(options["-n"]) else "")
    case = [[[index, processes, address], str(folder), strategy, program, *words] for index in range(processes)]
    with pool.start(bodies.runs_command, case, environ) as group:
        if fails:
            assert group.end(LIMIT_S) != [0]
        else:
            group.results(LIMIT_S)
        return group.ranks[0].printed()


def shorter(text: str, epochs: int = 1) -> str:
    """A script, or a change of it, that trains for five steps an epoch."""
    return text.replace("EPOCHS = 6", f"EPOCHS = {epochs}").replace("1440", "320")


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, id=page.stem, marks=[pytest.mark.slow] if page != FIRST else [])
        for page in sorted(LESSONS.glob("*.md"))
        if page != SURVIVE
    ],
)
def test_lesson(pool: Pool, addresses: Callable[[], str], tmp_path: Path, page: Path) -> None:
    """With few steps; the first lesson's script is there for the others. Runs that fail are of the next test."""
    epochs = 6 if page.stem == "predict" else 1  # it records 20 steps
    for kind, text in blocks(FIRST)[: 0 if page == FIRST else None]:
        if kind != "console" and "ValueError" not in text:
            save(kind, shorter(text, epochs), tmp_path)
    ran = 0
    for kind, text in blocks(page):
        if kind != "console":
            save(kind, shorter(text, epochs), tmp_path)
            continue
        for command, shown in commands(text):
            fails = "Traceback" in shown
            if not LONG.match(command) and not (fails and command.startswith("syncline run")):
                check_printed(command, call(pool, addresses(), command, tmp_path, fails=fails), shown)
                ran += 1
    assert ran > 1


@pytest.mark.deep
@pytest.mark.parametrize("page", [FIRST, SURVIVE], ids=lambda page: page.stem)
def test_a_lesson_runs_under_the_launcher(tmp_path: Path, page: Path) -> None:
    """In a shell: the first lesson's runs of two workers, one of which fails, and all of the lesson on lost workers."""
    epochs = 1 if page == FIRST else 7
    for kind, text in [] if page == FIRST else blocks(FIRST):
        if kind != "console" and "ValueError" not in text:
            save(kind, shorter(text, epochs), tmp_path)
    for program, module in (("python", ""), ("syncline", "-m syncline ")):
        (tmp_path / program).write_text(f'#!/bin/sh\nexec {sys.executable} {module}"$@"\n')
        (tmp_path / program).chmod(0o755)
    path = os.pathsep.join([str(tmp_path), os.environ["PATH"]])
    environ = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PATH": path}
    environ.pop("SYNCLINE_FLIGHT", None)  # a reader's run that fails leaves a record
    for kind, text in blocks(page):
        if kind != "console":
            waits = "sleep(2.0 if syncline.world_size() == 1 else 0)"  # few steps, in which a new worker has to come
            save(kind, shorter(text, epochs).replace("sleep(0.1)", waits), tmp_path)
            continue
        for command, shown in commands(text):
            if page == SURVIVE or command == "syncline run -n 2 train.py":
                done = subprocess.run(
                    ["bash", "-c", command],
                    cwd=tmp_path,
                    env=environ,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    text=True,
                    timeout=LIMIT_S,
                    check=False,
                )
                assert (done.returncode == 0) == ("Traceback" not in shown and "SIGKILL; rank" not in shown), (
                    done.stdout
                )
                check_printed(command, done.stdout, shown)


def test_no_example_is_forgotten() -> None:
    assert {path.name for path in EXAMPLES.glob("*.py")} == {
        "train.py",
        "own_strategy.py",
        "own_algorithm.py",
        "own_codec.py",
        "checkpoint.py",
        "numpy_loop.py",
        "spawn.py",
        "asynchronous.py",
        "caffe_way.py",
        "large_batch.py",
        "elastic.py",
        "pipeline_by_data.py",
        "tensor_by_data.py",
        "jax_digits.py",  # among the tests of trainers
        "tensorflow_digits.py",
    }
