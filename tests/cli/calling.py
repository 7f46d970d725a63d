"""The command line, called in this process, and what stands for a verb's work."""

from __future__ import annotations

from typing import Any

from click.testing import CliRunner, Result

from syncline_bench.cli import cli


def call(*arguments: str) -> Result:
    return CliRunner().invoke(cli, list(arguments), prog_name="syncline")


class Recorder:
    """Stands for a verb's work and keeps what it was called with."""

    def __init__(self, result: Any = 0) -> None:
        self.result = result
        self.args: tuple[Any, ...] = ()
        self.kwargs: dict[str, Any] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.args, self.kwargs = args, kwargs
        if isinstance(self.result, BaseException):
            raise self.result
        return self.result
