"""``syncline bench gradients``: one set of ranks after the other, and the rows.

If a set of ranks fails, its missing rows have the error, and the next set runs.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
from rich.console import Console

from ..display import Display, Task, shown
from ..machine import provenance
from ..messages import Message
from ..ranks import OnThisMachine, Ranks, RanksFailed
from ..report.bench import GradientResult, GradientRow, render_gradients
from ..report.units import decimal_size as size_text
from .gradient_cases import Form, Model, Request, Work

RANK = ("-m", "syncline_bench.gradients.gradient_ranks")


def measure(request: Request, display: Display) -> GradientResult:
    """All rows of a request, by number of ranks, then model, then form."""
    rows = [row for ranks in request.ranks for row in _Set(request, ranks).measure(display)]
    return GradientResult(
        **provenance(),
        # A reader looks for the model first, so the rows of a model stand together.
        rows=tuple(sorted(rows, key=lambda row: [model.workload for model in request.models].index(row.workload))),
    )


class _Set:
    """The measurements with one number of ranks."""

    def __init__(self, request: Request, ranks: int) -> None:
        self._request, self._ranks = request, ranks
        self._forms = request.forms_at(ranks)
        self._rows: dict[tuple[int, int], GradientRow] = {}
        self._doing, self._turns = "", 0

    def measure(self, display: Display) -> list[GradientRow]:
        """The rows of this number of ranks, finished or with an error."""
        work = Work(self._request.models, tuple(form.name for form in self._forms), self._request.repetitions)
        error = "the ranks ended without a result"
        with display.task(_count(self._ranks), self._request.turns_at(self._ranks)) as task:
            task.at(0, "connecting")
            try:
                with Ranks(work.to_json(), self._ranks, OnThisMachine(), RANK) as ranks:
                    for number in range(len(self._request.models)):
                        ranks.order(lambda message: self._take(message, task), model=number)
                    ranks.end()
            except RanksFailed as failure:
                error = f"{self._doing}: {failure}" if self._doing else str(failure)
        return [
            self._rows.get((number, at)) or self._row(model, form, error=error)
            for number, model in enumerate(self._request.models)
            for at, form in enumerate(self._forms)
        ]

    def _take(self, message: Message, task: Task) -> None:
        """A rank's message: the form that starts, or measurements."""
        if message["kind"] == "measured":
            self._heard(message)
            return
        nbytes, form = message["bytes"], self._forms[message["form"]]
        self._doing = f"during {form.name} of {size_text(nbytes)}"
        task.at(self._turns, next(model.workload for model in self._request.models if model.nbytes == nbytes))
        self._turns += 1

    def _heard(self, message: Message) -> None:
        number, at = message["model"], message["form"]
        model, form = self._request.models[number], self._forms[at]
        times, median = message["times_s"], float(np.median(message["times_s"]))
        added = float(np.median(message["added_s"]))
        limit = form.limit_s(model.nbytes, self._ranks, message["bytes_per_s"])
        self._rows[number, at] = self._row(
            model,
            form,
            repetitions=len(times),
            median_s=median,
            p99_s=float(np.percentile(times, 99)),
            added_s=added,
            share=added / median,
            limit_s=limit,
            of_limit=limit / added if limit and added > 0 else None,
            cpu_s=message["cpu_s"],
            sent_bytes=message["sent_bytes"],
            correct=message["correct"],
        )

    def _row(self, model: Model, form: Form, **figures: object) -> GradientRow:
        return GradientRow(
            model.workload,
            form.name,
            self._ranks,
            len(model.shapes),
            model.parameters,
            model.nbytes,
            form.passes_at(self._ranks),
            **figures,  # type: ignore[arg-type]  # what was measured, by the names of the fields
        )


def _count(ranks: int) -> str:
    return "1 process" if ranks == 1 else f"{ranks} ranks"


def run(
    request: Request,
    *,
    json_path: Path | None = None,
    report_path: Path | None = None,
    console: Console | None = None,
) -> int:
    """Measure as ``display.shown`` does. Returns 0 if every row was measured with right results, else 1."""

    def measured(display: Display) -> GradientResult:
        if request.left_out:
            display.say(f"not measured with 1 rank, which exchanges nothing: {', '.join(request.left_out)}")
        return measure(request, display)

    def page(result: GradientResult) -> str:
        from ..report.page import gradient_page  # matplotlib is only loaded for a page

        return gradient_page(result)

    files = {"json_path": json_path, "report_path": report_path}
    result = shown(measured, render_gradients, **files, page=page, console=console)
    return 0 if all(row.finished for row in result.rows) else 1
