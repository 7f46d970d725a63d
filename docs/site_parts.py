"""The parts of the site that Sphinx does not make.

Directives: ``plan`` draws an algorithm as ``syncline show --svg`` does, ``commands`` lists the help of every command,
``report`` calls one and links to the page that it writes, and ``results`` to that of a stored comparison. Docstrings
become reStructuredText. The site gets a first page at its root, and no page may ask another host for anything.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from syncline_bench.cli import cli
from syncline_bench.report.comparison import Result
from syncline_bench.report.page import comparison_page

_FIRST = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>Syncline</title>\n'
_REQUESTS = re.compile(
    r"""<(?!a\b)[^>]*\s(?:src|srcset|href|data|action|poster)=["']?(?:https?:)?//[^"'\s>]+"""
    r"""|url\(["']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*"""
)
"""The things that a browser fetches by itself, unlike the target of a link: scripts, styles, fonts, pictures."""
REPORTS = "_reports"


def setup(app: Sphinx) -> dict[str, bool]:
    """Register the parts of this file; Sphinx calls it."""
    app.add_directive("plan", PlanDrawing)
    app.add_directive("commands", Commands)
    app.add_directive("report", Report)
    app.add_directive("results", Results)
    app.connect("autodoc-process-docstring", adapt)
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}


def printed(*arguments: str) -> str:
    """The output of a command. A failure of the command is an error of the page."""
    done = CliRunner().invoke(cli, list(arguments), prog_name="syncline", terminal_width=90, catch_exceptions=False)
    if done.exit_code:
        raise RuntimeError(f"syncline {' '.join(arguments)} failed: {done.output}")
    return done.output


class PlanDrawing(SphinxDirective):
    """``{plan} ring --ranks 4``: a picture, in the colours of the page."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:  # noqa: D102
        picture = printed("show", *shlex.split(self.arguments[0]), "--svg", "-")
        return [nodes.raw("", f'<div class="plan">{picture}</div>', format="html")]


class Commands(SphinxDirective):
    """The help of all commands, a section for each."""

    def run(self) -> list[nodes.Node]:  # noqa: D102
        found = []
        for words in commands(cli, ()):
            name = "syncline " + " ".join(words)
            section = nodes.section(ids=["-".join(name.split())])
            section += nodes.title(text=name)
            section += nodes.literal_block(text=printed(*words, "--help"), language="text")
            found.append(section)
        return found


def commands(group: click.Group, words: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The words of every command, in the order of the help."""
    for name, command in group.commands.items():
        yield (*words, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*words, name))


class Report(SphinxDirective):
    """``{report} NAME.html predict ...``: a link to the page that the command writes with ``--report``."""

    required_arguments = 1
    final_argument_whitespace = True

    def run(self) -> list[nodes.Node]:  # noqa: D102
        name, *words = shlex.split(self.arguments[0])
        folder = Path(self.env.app.outdir) / REPORTS
        folder.mkdir(parents=True, exist_ok=True)
        self.write(folder / name, words)
        place = os.path.relpath(Path(REPORTS) / name, Path(self.env.docname).parent)
        link = nodes.reference("", f"Open {name}", internal=False, refuri=place)
        return [nodes.paragraph("", "", link)]

    def write(self, page: Path, words: list[str]) -> None:
        """Write the page of the gallery, with its reports beside it."""
        printed(*words, "--report", str(page))


class Results(Report):
    """``{results} NAME.html FILE.json``: the same for a comparison that ``compare --json`` has kept beside the page."""

    def write(self, page: Path, words: list[str]) -> None:  # noqa: D102
        stored = Path(self.env.doc2path(self.env.docname)).with_name(words[0])
        self.env.note_dependency(stored)
        page.write_text(comparison_page(Result.from_json(stored.read_text())))


def adapt(_: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:  # noqa: ARG001
    """Make a docstring reStructuredText: indented blocks are literal, bars around a letter are a norm's.

    A module keeps its first paragraph, as the pages say more.
    """
    if what == "module":
        del lines[lines.index("") + 1 :]
    for number in reversed(range(2, len(lines))):
        before = lines[number - 2].rstrip()
        starts = lines[number].startswith("    ") and not lines[number - 1].strip()
        if starts and before and not before.startswith((" ", "*", "-")) and not before.endswith("::"):
            lines[number:number] = ["::", ""]
    lines[:] = [re.sub(r"\|(\w)\|", r"\\|\1\\|", line) for line in lines]


def finish(app: Sphinx, failure: Exception | None) -> None:
    """Write the first page, and warn, which fails the build, about requests to other hosts."""
    if failure is not None or app.builder.name != "html":
        return
    (app.outdir / "index.html").write_text(_FIRST)
    for page in sorted(Path(app.outdir).rglob("*")):
        if page.suffix in {".html", ".css"}:
            for request in _REQUESTS.findall(page.read_text(encoding="utf-8")):
                logging.getLogger(__name__).warning("%s asks another host: %s", page.relative_to(app.outdir), request)
