"""``syncline bench gradients``: what is asked for, what every form leaves behind, rows, failures, and real ranks."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from rich.console import Console

torch = pytest.importorskip("torch")

from syncline.launch.connecting import connect_session  # noqa: E402
from syncline.launch.environment import recognise  # noqa: E402
from syncline.launch.rendezvous import Rendezvous  # noqa: E402
from syncline.session.session import Session  # noqa: E402
from syncline.strategy.strategy import Strategy  # noqa: E402
from syncline.wire.listener import bind_here  # noqa: E402
from syncline_bench.cli import cli  # noqa: E402
from syncline_bench.gradients import gradient_bench, gradient_cases, iterations  # noqa: E402
from syncline_bench.gradients.gradient_cases import (  # noqa: E402
    DEFAULT_WORKLOADS,
    FORMS,
    Model,
    Request,
    Work,
    exchanges_only,
    forms_of,
    model_of,
)
from syncline_bench.gradients.gradient_ranks import STRATEGY, _Measurement, order_of  # noqa: E402
from syncline_bench.gradients.iterations import Ground, iteration_of  # noqa: E402
from syncline_bench.ranks import RanksFailed  # noqa: E402
from syncline_bench.report.bench import BARE, CONTIGUOUS, GradientResult, GradientRow  # noqa: E402
from syncline_bench.report.units import decimal_size  # noqa: E402

SHAPES = ((7, 3), (5,), (2, 3, 4), (1,), (300,))
TOY = Model("toy", SHAPES)
MOVING = [name for name in FORMS if name != BARE]

Group = Callable[..., list[Any]]


@pytest.mark.parametrize(
    ("workload", "parameters", "tensors"),
    [("alexnet", 60_965_224, 16), ("googlenet", 6_998_552, 116), ("resnet50", 25_557_032, 161)],
)
def test_models_have_their_published_sizes_and_take_no_memory(workload: str, parameters: int, tensors: int) -> None:
    model = model_of(f"synthetic:{workload}")
    assert (model.parameters, model.nbytes, len(model.shapes)) == (parameters, 4 * parameters, tensors)
    assert model.workload in DEFAULT_WORKLOADS


def test_a_form_is_limited_by_what_it_has_to_move() -> None:
    passes = {name: form.passes for name, form in FORMS.items()}
    assert passes[BARE] == passes["layerwise:all"] == 0
    assert 2 * passes[CONTIGUOUS] == passes["copied:mul"] == passes["copied:flatten"] == 4
    assert FORMS["copied:mul"].limit_s(1000, 2, 8e6) == pytest.approx(0.001)
    # Dividing by the number of ranks is two more where it is not done on the way.
    assert FORMS["copied:cat"].limit_s(1000, 2, 8e6) == pytest.approx(0.0015)
    assert [FORMS["copied:cat"].passes_at(ranks) for ranks in (1, 2, 4)] == [4, 6, 6]
    assert [FORMS[CONTIGUOUS].passes_at(ranks) for ranks in (1, 2, 4)] == [2, 2, 2]
    assert [form.name for form in forms_of(["copied:cat"])] == [BARE, "copied:cat"]
    assert forms_of([]) == tuple(FORMS.values())


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--with", "contigous"], "did you mean 'contiguous'"),
        (["--with", "gloo"], "there are bare, contiguous"),
        (["--ranks", "0"], "use 1 to 64"),
        (["--repetitions", "0"], "x>=1"),
        (["--with", "layerwise:all", "--ranks", "1"], "layerwise:all only exchanges: use --ranks 2"),
        (["--workloads", "synthetic:alexnot"], "did you mean 'synthetic:alexnet'"),
        (["--ranks", "64"], "fewer --ranks"),
        (["--json", "/proc/nowhere/rows.json"], "choose another path"),
    ],
)
def test_mistakes_are_named_before_anything_is_measured(
    arguments: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gradient_bench, "measure", lambda *_: pytest.fail("was measured"))
    monkeypatch.setattr(gradient_cases, "available_memory_bytes", lambda: 20 << 30)
    done = CliRunner().invoke(cli, ["bench", "gradients", *arguments])
    assert done.exit_code == 2
    assert says in " ".join(done.output.split())
    assert "Traceback" not in done.output


@pytest.mark.parametrize(("ranks", "left_out"), [([1, 2], ("layerwise:one",)), ([1], ("layerwise:one",)), ([2], ())])
def test_a_form_that_is_left_out_is_named(
    ranks: list[int], left_out: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = gradient_cases.request_of(workloads=["digits"], ranks=ranks, forms=[CONTIGUOUS, "layerwise:one"])
    assert asked.left_out == left_out
    monkeypatch.setattr(gradient_bench, "measure", lambda *_: GradientResult("here", 2))
    out = io.StringIO()
    gradient_bench.run(asked, console=Console(file=out, width=100))
    assert ("not measured with 1 rank, which exchanges nothing: layerwise:one" in out.getvalue()) is bool(left_out)
    assert gradient_cases.request_of(workloads=["digits"], ranks=ranks).left_out == ()


def test_forms_take_turns_in_orders_in_which_none_always_follows_the_same() -> None:
    orders = [order_of(repetition, 8) for repetition in range(15)]
    assert all(sorted(order) == list(range(8)) for order in orders)
    assert order_of(3, 8) == orders[3]
    before = {at: {order[order.index(at) - 1] for order in orders if order[0] != at} for at in range(8)}
    assert min(map(len, before.values())) > 3


def test_work_survives_its_way_down() -> None:
    work = Work((TOY, Model("other", ((2,),))), (BARE, CONTIGUOUS), 3)
    assert Work.from_json(work.to_json()) == work


# What a form leaves behind.


def one_iteration(name: str, seed: int) -> Callable[[Session], tuple[bool, bool, int, int]]:
    """A body of a rank: two iterations, whose results are checked, and the second against other gradients too."""

    def body(session: Session) -> tuple[bool, bool, int, int]:
        ground = Ground(session, SHAPES)
        form = iteration_of(name, ground)
        for now in (seed + 1, seed):
            ground.fill(now)
            form.ready()
            session.barrier()
            form.run()
            session.barrier()
        return form.is_right(seed), form.is_right(seed + 1), form.exchanged_bytes, ground.nbytes

    return body


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", MOVING)
def test_every_form_leaves_the_mean_of_all_ranks_and_exchanges_the_same(group: Group, name: str, workers: int) -> None:
    for right, other, exchanged, nbytes in group("ring schedule=fifo", workers, one_iteration(name, 5)):
        assert right
        assert not other
        assert exchanged == nbytes == TOY.nbytes


@contextmanager
def alone() -> Iterator[Session]:
    """The session of a single process."""
    with bind_here() as door:
        place = f"127.0.0.1:{door.getsockname()[1]}"
    point = Rendezvous(recognise(rank=0, world_size=1, address=place))
    session = connect_session(Strategy.parse(STRATEGY), point, "gradients alone")
    try:
        yield session
    finally:
        session.shutdown()
        point.close()


def test_one_process_alone_copies_and_keeps_its_own_gradients() -> None:
    with alone() as session:
        for form in FORMS.values():
            if not exchanges_only(form):
                assert one_iteration(form.name, 5)(session)[:2] == (True, form.name == BARE)


def test_a_form_that_moves_nothing_is_found_wrong_in_one_process_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A single rank's mean is its own gradient, which is there without any moving."""

    def still(form: Any) -> None:
        model = getattr(form, "_model", form._ground.plain)
        model.zero_grad()
        model().backward()
        for parameter, gradient in zip(model.parameters(), form._ground.gradients, strict=True):
            parameter.grad = gradient

    moving = [name for name, form in FORMS.items() if form.passes]
    with alone() as session:
        with monkeypatch.context() as patch:
            for kind in (iterations._Copied, iterations._Prepared):
                patch.setattr(kind, "run", still)
            assert not any(one_iteration(name, 5)(session)[0] for name in moving)
        monkeypatch.setattr(torch, "_foreach_copy_", lambda *_: None)
        assert not any(one_iteration(name, 5)(session)[0] for name in moving if name.startswith("copied"))


class Alone:
    """Stands in for the meeting of a single rank, and for what it reports to."""

    rank, world = 0, 1

    def __init__(self) -> None:
        self.sent: list[dict[str, Any]] = []

    def wait(self) -> None:
        """Nobody else is there."""

    def gather(self, *values: float) -> np.ndarray[Any, Any]:
        return np.array([values])

    def send(self, kind: str, **fields: Any) -> None:
        if kind == "measured":
            self.sent.append(fields)


def test_results_are_checked_before_anything_is_timed_and_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, int]] = []

    def noted(name: str) -> Callable[..., Any]:
        done = getattr(_Measurement, name)

        def call(self: _Measurement, at: int, *more: Any) -> Any:
            seen.append((name, at))
            return done(self, at, *more)

        return call

    for name in ("_check", "_time"):
        monkeypatch.setattr(_Measurement, name, noted(name))
    forms, met = (BARE, CONTIGUOUS, "copied:flatten"), Alone()
    with alone() as session:
        _Measurement(Work((TOY,), forms, 2), met).run(0, TOY, session)  # type: ignore[arg-type]
    assert [fields["correct"] for fields in met.sent] == [True] * 3
    for at in range(3):
        assert "".join(name[1] for name, form in seen if form == at) == "ctct" + "t" + "tc"


def test_an_exchange_that_does_not_happen_is_found_wrong(group: Group, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ground, "exchange", lambda *_: None)
    for name in (BARE, "placed", "copied:mul", "copied:cat", "layerwise:one"):
        assert not any(found[0] for found in group("ring schedule=fifo", 2, one_iteration(name, 5)))


def test_gradients_are_moved_as_often_as_the_form_says(group: Group) -> None:
    """Bare leaves autograd's own memory as ``grad``, the contiguous ones a block, the copied ones write into it."""

    def body(session: Session) -> None:
        ground = Ground(session, SHAPES)
        held = [gradient.data_ptr() for gradient in ground.gradients]

        def places(model: torch.nn.Module) -> list[int]:
            return [parameter.grad.data_ptr() for parameter in model.parameters() if parameter.grad is not None]

        for name in (BARE, "copied:foreach", "layerwise:all"):
            iteration_of(name, ground).run()
            assert places(ground.plain) == held
        iteration_of("placed", ground).run()
        assert min(places(ground.plain)) == ground.array.ctypes.data
        for name in (CONTIGUOUS, "accumulated"):
            form: Any = iteration_of(name, ground)
            form.run()
            (block,) = session.prepared[session.enter_model(form._model)].replica.storage.arrays
            first = places(form._model)
            assert min(first) == block.ctypes.data
            form.run()
            assert places(form._model) == first

    group("ring schedule=fifo", 2, body)


# The course, with pretended ranks.


def report(model: int, form: int, scale: float = 1.0) -> dict[str, Any]:
    return {
        "kind": "measured",
        "model": model,
        "form": form,
        "times_s": [0.004 * scale, 0.002, 0.009],
        "added_s": [0.001, 0.002, 0.003],
        "cpu_s": 0.003,
        "sent_bytes": 1456.0,
        "correct": True,
        "bytes_per_s": 8e6,
    }


def measured(monkeypatch: pytest.MonkeyPatch, asked: Request, play: Callable[..., None]) -> tuple[GradientResult, str]:
    class Ranks:
        """Stands in for a set of ranks."""

        def __init__(self, work: str, ranks: int, *_: Any) -> None:
            self._work, self._ranks = Work.from_json(work), ranks

        def __enter__(self) -> Ranks:
            return self

        def __exit__(self, *_: object) -> None:
            return None

        def order(self, heard: Any, model: int) -> None:
            assert model == 0
            heard({"kind": "turn", "form": 1, "bytes": TOY.nbytes})
            play(self._work, self._ranks, heard)

        def end(self) -> None:
            return None

    monkeypatch.setattr(gradient_bench, "Ranks", Ranks)
    out = io.StringIO()
    with gradient_bench.Display(Console(file=out, width=100)) as display:
        return gradient_bench.measure(asked, display), out.getvalue()


def test_figures_follow_from_the_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(work: Work, ranks: int, heard: Any) -> None:  # noqa: ARG001
        for number, _ in enumerate(work.forms):
            heard(report(0, number))

    asked = Request((TOY,), tuple(FORMS.values()), (1, 2), 3)
    result, text = measured(monkeypatch, asked, play)
    alone = [row.form for row in result.rows if row.ranks == 1]
    assert alone == [form.name for form in FORMS.values() if not exchanges_only(form)]
    assert [row.form for row in result.rows if row.ranks == 2] == list(FORMS)
    row = next(row for row in result.rows if row.place == ("toy", 2) and row.form == "copied:mul")
    assert (row.tensors, row.parameters, row.bytes, row.passes) == (5, TOY.parameters, TOY.nbytes, 4)
    assert (row.repetitions, row.median_s, row.added_s, row.share) == (3, 0.004, 0.002, 0.5)
    assert row.limit_s == pytest.approx(4 * TOY.nbytes * 2 / 8e6)
    assert row.of_limit == pytest.approx((row.limit_s or 0) / 0.002)
    assert (row.cpu_s, row.sent_bytes) == (0.003, 1456.0)
    assert all(row.finished for row in result.rows)
    assert "2 ranks: toy" in text


def test_a_set_that_fails_leaves_its_error_and_the_next_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def play(work: Work, ranks: int, heard: Any) -> None:
        heard(report(0, 0))
        if ranks == 2:
            raise RanksFailed("rank 1 was killed by SIGKILL")
        for number, _ in enumerate(work.forms):
            heard(report(0, number))

    result, _ = measured(monkeypatch, Request((TOY,), forms_of(["contiguous", "copied:mul"]), (2, 3), 3), play)
    failed = f"during contiguous of {decimal_size(TOY.nbytes)}: rank 1 was killed by SIGKILL"
    assert [row.error for row in result.rows] == [None, failed, failed, None, None, None]
    assert [row.finished for row in result.rows] == [True, False, False, True, True, True]


def test_wrong_rows_and_missing_ones_fail_the_verb_and_interrupts_leave_no_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = Request((TOY,), forms_of([CONTIGUOUS]), (2,), 3)
    console = Console(file=io.StringIO(), width=100)
    rows = (GradientRow("toy", BARE, 2, 5, 350, 1400, 0, median_s=1.0, added_s=0.0, correct=True),)
    for row, status in ((rows[0], 0), (GradientRow("toy", BARE, 2, 5, 350, 1400, 0, correct=False, median_s=1.0), 1)):
        result = GradientResult("here", 2, rows=(row,))
        monkeypatch.setattr(gradient_bench, "measure", lambda *_, result=result: result)
        assert gradient_bench.run(asked, json_path=tmp_path / "rows.json", console=console) == status

    def interrupt(*_: object) -> GradientResult:
        raise KeyboardInterrupt

    monkeypatch.setattr(gradient_bench, "measure", interrupt)
    with pytest.raises(KeyboardInterrupt):
        gradient_bench.run(asked, json_path=tmp_path / "others.json", console=console)
    assert [path.name for path in tmp_path.iterdir()] == ["rows.json"]


@pytest.mark.slow
def test_real_ranks_measure_every_form_and_find_it_right(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    arguments = ["--workloads", "digits", "--ranks", "2", "--repetitions", "2", "--json", str(path)]
    done = CliRunner().invoke(cli, ["bench", "gradients", *arguments])
    assert done.exit_code == 0, done.output
    rows = GradientResult.from_json(path.read_text()).rows
    assert [row.form for row in rows] == list(FORMS)
    assert all(row.finished for row in rows)
    # 2(N-1)/N of the gradients, in whatever form, and a few tickets.
    assert all(0 <= (row.sent_bytes or 0) - row.bytes < 100 for row in rows)
    assert all((row.cpu_s or 0) > 0 for row in rows)
    assert all(row.added_s == 0 for row in rows if row.form == BARE)
    assert json.loads(path.read_text())["rows"][0]["workload"] == "digits"
