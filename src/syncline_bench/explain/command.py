"""The command ``syncline explain``: finds out what a file is, explains it, and writes or prints the explanation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from syncline.errors import DataError, UsageError
from syncline.timeline.flight import FORMAT
from syncline.wire.meeting import printable

from ..display import console_beside
from ..report.explanation import Explanation
from ..report.files import replace_text, result_paths
from .activity import Activity, observe
from .causes import busy_cores, judge
from .changes import Outlook, outlook
from .flights import explain_flight
from .path import critical_path
from .reading import is_timeline, read_timeline
from .results import explain_result

_MOST_BYTES = 1 << 28
"""The largest result file that is read."""


def run(path: Path, only: str = "", json_path: Path | None = None, report_path: Path | None = None) -> None:
    """Explain a file, print the lines, write the result and its page. UsageError for files without an explanation."""
    target, page = result_paths({"--json": json_path, "--report": report_path})
    found = explain(path, only)
    if target is not None:
        found.save(target)
    if page is not None:
        from ..report.page import explanation_page

        replace_text(page, explanation_page(found))
    console_beside(target, page).print(found)


def explain(path: Path, only: str = "") -> Explanation:
    """The explanation of a file: of the run or row whose name contains ``only``, or else of the slowest."""
    if is_timeline(path):
        return explain_timeline(path, only)
    try:
        if path.stat().st_size > _MOST_BYTES:
            raise DataError(f"{path} has more than {_MOST_BYTES >> 20} MiB: it is no result of Syncline")
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise DataError(f"{path} is neither a timeline nor a result: it is not text") from None
    is_flight = f'"format": "{FORMAT}"' in text[:100]
    return explain_flight(path) if is_flight else explain_result(path, text, only)


def explain_timeline(path: Path, only: str = "") -> Explanation:
    """The explanation of the slowest run of a timeline, or of the one whose name contains ``only``."""
    runs = [one for one in read_timeline(path) if only in one.title]
    if not runs:
        what = f" whose name contains {printable(only)!r}" if only else ""
        raise UsageError(f"{path} has no run{what}: see the names of its processes in the viewer")
    seen, refused = list[Activity](), list[UsageError]()
    for one in runs:
        try:
            seen.append(observe(one))
        except UsageError as error:
            refused.append(error)
    if not seen:
        raise UsageError(f"{path}: {refused[0]}")
    activity = max(seen, key=lambda one: one.step_s)
    left_out = sum(process.left_out for one in runs for process in one.processes)
    remarks = [f"{left_out:,} later spans were left out of the recording."] if left_out else []
    if len(seen) > 1:
        remarks.append(f"The file has {len(seen)} runs, and this one is the slowest: --only chooses another.")
    found = explain_activity(activity)
    return replace(found, file=path.name, remarks=(*found.remarks, *remarks))


def explain_activity(activity: Activity) -> Explanation:
    """The explanation of what was recorded of a run."""
    causes = tuple(judge(activity))
    ahead = outlook(activity, causes) if causes else Outlook()
    found = Explanation(
        kind="timeline",
        name=activity.title or printable(activity.strategy),
        healthy=not causes,
        iteration_s=activity.step_s,
        iterations=activity.steps.shape[1],
        workers=len(activity.workers),
        stages_s={stage: float(np.median(times)) for stage, times in activity.stages.items() if times.any()},
        causes=causes,
        changes=ahead.changes,
        path=critical_path(activity),
        model_s=ahead.model_s,
        remarks=ahead.remarks,
    )
    if not (causes or found.computing):
        return found
    return replace(found, remarks=(*busy_cores(activity), *ahead.remarks))
