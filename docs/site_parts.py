"""What the site has beyond Sphinx: a first page at its root, and a check that pages ask no other host for anything."""

from __future__ import annotations

import re
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.util import logging

_FIRST = '<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html"><title>Syncline</title>\n'
_REQUESTS = re.compile(
    r"""<(?!a\b)[^>]*\s(?:src|srcset|href|data|action|poster)=["']?(?:https?:)?//[^"'\s>]+|url\(["']?(?:https?:)?//[^)]*|@import[^;]*//[^;]*"""
)
"""Whatever a browser fetches by itself, unlike the target of a link: scripts, styles, fonts, pictures."""


def setup(app: Sphinx) -> dict[str, bool]:
    """Called by Sphinx."""
    app.connect("build-finished", finish)
    return {"parallel_read_safe": True}


def finish(app: Sphinx, failure: Exception | None) -> None:
    """Write the first page, and warn, which fails the build, about requests to other hosts."""
    if failure is not None or app.builder.name != "html":
        return
    (app.outdir / "index.html").write_text(_FIRST)
    for page in sorted(Path(app.outdir).rglob("*")):
        if page.suffix in {".html", ".css"}:
            for request in _REQUESTS.findall(page.read_text(encoding="utf-8")):
                logging.getLogger(__name__).warning("%s asks another host: %s", page.relative_to(app.outdir), request)
