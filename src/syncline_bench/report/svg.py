"""A matplotlib figure as SVG of which many can stand in one HTML page.

Owns the way from a figure to inline SVG: no namespaces, scripts, comments, dates or document-wide styles; ids made
unique with a prefix, since ids are per page and matplotlib numbers them per figure; the page's own text and background
colours in place of two fixed ones, so that a chart follows the light or dark scheme of the page around it.
"""

from __future__ import annotations

import hashlib
import io
import re
import xml.etree.ElementTree as ET

from matplotlib.figure import Figure

INK = "#010203"
"""Stands for the page's text colour."""
PAPER = "#fdfcfb"
"""Stands for the page's background colour."""

_CSS = {INK: "currentColor", PAPER: "var(--paper)"}
_REFERENCE = re.compile(r"url\(#([^)]+)\)")


def css(color: str) -> str:
    """The CSS form of a colour used in a chart."""
    return _CSS.get(color, color)


def render(figure: Figure, title: str) -> str:
    """The figure as an ``<svg>`` element that fills the width it is given; ``title`` is what a screen reader says."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    root = ET.fromstring(buffer.getvalue())
    prefix = "c" + hashlib.sha256(title.encode()).hexdigest()[:8]
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag.rpartition("}")[2] in ("metadata", "style"):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        element.attrib = {
            name.rpartition("}")[2]: _value(name.rpartition("}")[2], value, prefix)
            for name, value in element.attrib.items()
        }
    for size in ("width", "height"):
        root.attrib.pop(size, None)
    root.set("role", "img")
    # What matplotlib's removed style sheet said for every element.
    root.set("style", "stroke-linejoin:round;stroke-linecap:butt")
    label = ET.Element("title")
    label.text = title
    root.insert(0, label)
    return ET.tostring(root, encoding="unicode")


def _value(name: str, value: str, prefix: str) -> str:
    if name == "id":
        return f"{prefix}-{value}"
    if name == "href" and value.startswith("#"):
        return f"#{prefix}-{value[1:]}"
    value = _REFERENCE.sub(rf"url(#{prefix}-\1)", value)
    for color, replacement in _CSS.items():
        value = value.replace(color, replacement)
    return value
