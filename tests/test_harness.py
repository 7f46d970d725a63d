"""What the tests share: it ends, and says who has not, and finds room for tests from elsewhere."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import threads
from pool import Pool
from syncline.errors import ClosedError
from syncline.session.session import Session

LIMIT_S = 30.0
HERE = Path(__file__).parent


@pytest.fixture
def shared(pytestconfig: pytest.Config) -> Any:
    """The module ``conftest`` of this folder."""
    return pytestconfig.pluginmanager.get_plugin(str(HERE / "conftest.py"))


def test_tests_from_elsewhere_are_the_last(shared: Any, tmp_path: Path) -> None:
    paths = [tmp_path / "test_own.py", HERE / "test_engine.py", HERE / "parallel" / "test_training.py"]
    items = [SimpleNamespace(path=path, name="test_it") for path in paths]
    shared.pytest_collection_modifyitems(items)
    assert [item.path for item in items] == paths[::-1]


def test_what_few_have_installed_is_slow(shared: Any, tmp_path: Path) -> None:
    """Trainers, and contracts and processes over message libraries; a test of compiled models is none of these."""
    slow = ["trainers/test_a.py::test_it", "contracts/test_b.py::test_it[ring-ucx]"]
    slow += ["parallel/test_c.py::test_it[ring transport=mpi(onesided=on)]", "contracts/test_b.py::test_it[mpich-2]"]
    fast = ["contracts/test_b.py::test_it[zmq]", "parallel/test_c.py::test_compiled[compiled]"]
    fast += ["bench/test_d.py::test_it[mpich]", f"{tmp_path}/trainers/test_e.py::test_it"]
    marked: list[str] = []
    items = [
        SimpleNamespace(path=HERE / path, name=name, add_marker=lambda _, one=f"{path}::{name}": marked.append(one))
        for path, name in (one.split("::") for one in slow + fast)
    ]
    shared.pytest_collection_modifyitems(items)
    assert sorted(marked) == sorted(slow)


def test_files_that_are_to_begin_are_there(shared: Any) -> None:
    """None has moved away, or is begun earlier by a name that stands before its own."""
    paths = [path.relative_to(HERE).as_posix() for path in HERE.rglob("test_*.py")]
    begun = [next((start for start in shared.FIRST if path.startswith(start)), None) for path in paths]
    assert set(shared.FIRST) <= set(begun)


def test_files_of_tests_have_names_of_their_own() -> None:
    """Folders of tests are no packages: of two modules of one name the second is not run."""
    names = Counter(path.name for path in HERE.rglob("*.py") if path.name not in ("conftest.py", "__main__.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_all_ranks_that_do_not_end_are_named(group: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits in its session, ranks 1 and 2 for something of their own; rank 3 ends."""
    monkeypatch.setattr(threads, "LIMIT_S", 0.1)
    monkeypatch.setattr(threads, "END_S", 0.1)
    ended, over = [threading.Event() for _ in range(4)], threading.Event()

    def body(session: Session) -> None:
        if session.rank == 0:
            try:
                session.barrier()
            except ClosedError as error:
                raise AssertionError from error
            finally:
                ended[0].set()
        elif session.rank < 3:
            over.wait(LIMIT_S)
            ended[session.rank].set()

    try:
        with pytest.raises(TimeoutError, match=r"not done within 0 s: .*rank 1 .*still there: .*rank 1 .*rank 2 "):
            group("ring", 4, body)
    finally:
        over.set()
    assert all(event.wait(LIMIT_S) for event in ended[:3])


def test_no_rank_is_forked_from_a_process_with_threads(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Its child might find a lock taken that nobody gives back."""
    source = "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True).start()\n"
    (tmp_path / "begins_one.py").write_text(source + "def rank(line): pass\n")
    pool = Pool(tmp_path, "begins_one")
    try:
        with pytest.raises((RuntimeError, BrokenPipeError)):
            pool.start(test_files_of_tests_have_names_of_their_own, [[]])
    finally:
        pool.close()
    assert "importing begins_one has started" in capfd.readouterr().err


def test_the_folder_of_a_pool_goes_with_the_process_that_asked_for_it(tmp_path: Path) -> None:
    """Also where that is killed, with a rank in its work; no other user may write to the folder."""
    (tmp_path / "of_a_rank.py").write_text(
        "import os, signal, stat\n"
        "def rank(line):\n"
        "    line.send([os.environ['SCRATCH'], stat.S_IMODE(os.stat(os.environ['SCRATCH']).st_mode)])\n"
        "    signal.pause()\n"
    )
    script = (
        "import os, signal, sys\nfrom pathlib import Path\nimport of_a_rank\nfrom pool import Pool\n"
        "group = Pool(Path(sys.argv[1]), 'of_a_rank', scratch='SCRATCH').start(of_a_rank.rank, [[]])\n"
        "group.hear(1)\nprint(*group.ranks[0].said[0], flush=True)\nos.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([str(HERE), str(tmp_path), *filter(None, sys.path)])
    with subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path},
    ) as client:  # fmt: skip
        said = client.communicate(timeout=4 * LIMIT_S)[0]  # until the server has ended too, which holds the same pipe
    folder, mode = said.split()
    assert int(mode) == 0o700
    assert not Path(folder).exists()
