"""What begins and ends with a test of starts: every process's way to the meeting, each in a thread."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from starts import LIMIT_S, Case, meet

from syncline.errors import GroupError, UsageError
from syncline.launch.environment import Environment
from syncline.launch.rendezvous import Joined, Rendezvous


@pytest.fixture
def start() -> Iterator[Case]:
    """Every process's start, each in a thread; what each got."""
    points: dict[Environment, Rendezvous] = {}

    def process(place: Environment, run: str, options: dict[str, Any], body: Callable[[Joined], Any]) -> Any:
        point = points.setdefault(place, Rendezvous(place))
        try:
            with point.join(
                run, options.get("secret"), options.get("interface"), options.get("timeout", LIMIT_S)
            ) as it:
                return body(it)
        except (GroupError, UsageError) as error:
            return error

    def all_of(
        *places: Environment, run: str = "run", body: Callable[[Joined], Any] = meet, each: Any = (), **options: Any
    ) -> list[Any]:
        each = each or [options for _ in places]
        with ThreadPoolExecutor(len(places)) as pool:
            calls = [pool.submit(process, place, run, how, body) for place, how in zip(places, each, strict=True)]
            return [call.result(2 * LIMIT_S) for call in calls]

    yield all_of
    for point in points.values():
        point.close()
