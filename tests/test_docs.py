"""What the documentation says exists: links lead somewhere, commands parse, strategies can be built."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path

import click
import pytest

from syncline import registry, testing
from syncline.codecs import Codec
from syncline.errors import StrategyError, UsageError
from syncline.nouns import Spec
from syncline.strategy.grammar import Part, read_part
from syncline.strategy.strategy import Strategy
from syncline.strategy.words import WORDS, build, vocabulary
from syncline.tuning.codec_times import every_codec
from syncline_bench.cli import cli
from syncline_bench.cli.bench import USUAL
from syncline_bench.contenders import contender_of
from syncline_bench.report.accuracy import AccuracyRow
from syncline_bench.report.bench import CodecRow, GradientRow
from syncline_bench.report.comparison import BASELINE
from syncline_bench.report.files import fields_of
from syncline_bench.report.predictions import Predicted
from syncline_bench.report.tuning import Tried, Tuned

ROOT = Path(__file__).parent.parent
SITE = {page.stem: page for page in (ROOT / "docs").rglob("*.md") if "_build" not in page.parts}
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *SITE.values()])
EXAMPLES = sorted((ROOT / "examples").rglob("*.py"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """The names under which a page's headings can be linked to."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.is_file(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_row_of_a_table_is_one_line(page: Path) -> None:
    """What stands in a second line would be a row of its own."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for line in text.splitlines():
        assert not line.startswith("|") or line.rstrip().endswith("|"), line


@pytest.mark.parametrize(
    ("page", "head", "rows", "others"),
    [
        ("accuracy", "field", AccuracyRow, None),
        ("bench", "field", GradientRow, None),
        ("codecs", "field", CodecRow, None),
        ("prediction", "field of a row", Predicted, None),
        ("tuning", "field", Tried, Tuned),
    ],
)
def test_lists_of_fields_are_those_of_the_result_files(page: str, head: str, rows: type, others: type | None) -> None:
    """Each field of a row is listed, ``a`` to ``b`` for all between; of ``others`` those that need an explanation."""
    names, more = ([name for name, _ in fields_of(kind)] if kind else [] for kind in (rows, others))
    table = SITE[page].read_text().partition(f"| {head} | meaning |\n|---|---|\n")[2].partition("\n\n")[0]
    said = set(re.findall(r"`(\w+)`", table))
    for first, last in re.findall(r"`(\w+)` to `(\w+)`", table):
        said |= set(names[names.index(first) : names.index(last) + 1])
    assert said >= set(names)
    for line in table.splitlines():
        for name in re.findall(r"`(\w+)`", line.split("|")[1]):
            assert name in (*names, *more), name


def test_the_page_for_newcomers_names_files_and_laws_that_exist() -> None:
    """Rooms of its drawing are folders, their first words files in these."""
    page = SITE["find-your-way"].read_text()
    places = [ROOT, ROOT / "src", ROOT / "src" / "syncline"]
    for name in re.findall(r"`([\w/]+(?:/|\.py))`", page):
        assert any((place / name).exists() for place in places), name
    for law in re.findall(r"`(check_\w+)`", page):
        assert law in testing.__all__
    room, found = "", set[str]()
    for line in page.split("```")[1].splitlines()[2:]:  # the first is the script's
        room = (re.match(r"[a-z_/]+", line) or [room])[0]
        for files in re.findall(r"(?:^| {2,})([a-z]+(?:, [a-z]+)*) {3,}", line[20:]):
            for file in files.split(", "):
                place = ROOT / "src" / "syncline" / room / file
                assert place.with_suffix(".py").exists(), place
                found.add(file)
    assert {"hooks", "deferred", "step", "owners", "reducing", "shm", "links"} <= found
    assert len(page.splitlines()) <= 60


def test_every_path_in_the_design_exists() -> None:
    page = SITE["design"].read_text()
    places = [ROOT, ROOT / "src", ROOT / "src" / "syncline"]
    named = set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+)(?:\.py)?`", page))
    assert len(named) > 30
    for name in named:
        assert any((place / name).is_dir() or (place / f"{name}.py").exists() for place in places), name


def commands() -> list[tuple[str, str]]:
    """Every line of an indented or fenced block that begins with ``syncline``, and where it stands."""
    found = []
    for path in (*PAGES, *EXAMPLES):
        code = False
        for line in path.read_text().splitlines():
            code ^= line.startswith("```")
            text = line.strip()
            if (code or line.startswith("    ")) and re.match(r"syncline [a-z]+\b(?!:)", text):
                found.append((name_of(path), text))
    return found


@pytest.mark.parametrize(("page", "line"), commands())
def test_commands_parse(page: str, line: str) -> None:  # noqa: ARG001 - names the page when it fails
    _, verb, *arguments = shlex.split(line, comments=True)
    command = cli.commands[verb]
    if isinstance(command, click.Group):
        named = arguments and arguments[0] in command.commands
        command, arguments = (
            (command.commands[arguments[0]], arguments[1:]) if named else (command.commands[USUAL], arguments)
        )
    context = command.make_context(verb, arguments)
    script = context.params.get("script")
    assert script is None or (ROOT / script).is_file()
    if context.params.get("strategy"):
        Strategy.parse(context.params["strategy"])
    for text in context.params.get("strategies", ()):
        assert text == BASELINE or contender_of(text, 4, one_host=True).text


def test_the_table_of_copies_has_every_transport_and_every_peer_of_the_bench() -> None:
    """Each registered one has a row with its copies at either end, and its bottleneck."""
    section = SITE["bench"].read_text().partition("## Copies of each library\n")[2]
    rows = re.findall(r"^\| (`[^|]*) \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", section.partition("\n## ")[0], re.MULTILINE)
    told = {name for row in rows for name in re.findall(r"`([^`]+)`", row[0])}
    libraries = {
        str(item.capabilities.get("library")) for item in map(partial(registry.get, "peers"), peers_of_bench())
    }
    whole = {re.sub(rf"^({'|'.join(libraries)}):", "mpi:", name) for name in peers_of_bench()}  # of any MPI library
    assert told == {*registry.names("transports"), *whole, "mpi(onesided=on)"}


def peers_of_bench() -> list[str]:
    """The peers that are there for their collectives."""
    return [name for name in registry.names("peers") if "collectives" in registry.get("peers", name).capabilities]


def test_the_table_of_strategies_in_the_readme_is_built() -> None:
    rows = re.findall(r"^\| (architecture|`\w+=`) \| (.*) \|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert [row[0].strip("`=") for row in rows] == list(WORDS)
    built = {(item.word, item.name) for item in vocabulary()}
    for word, values in rows:
        for value in re.findall(r"`([^`]+)`", values):
            assert (word.strip("`="), value.partition("(")[0]) in built
            parsed(word, value)


def parsed(word: str, value: str) -> Strategy:
    """A strategy of that word; sync modes that need them have owners of the weights."""
    if word == "architecture":
        return Strategy.parse(value)
    text = f"{word.strip('`')}{value}"
    try:
        return Strategy.parse(text)
    except StrategyError:
        return Strategy.parse(f"ps {text}")


def test_the_readme_says_which_words_need_arguments() -> None:
    """A word of the table is what its bare name means, or is among those that mean nothing without arguments."""
    text = (ROOT / "README.md").read_text()
    (sentence,) = re.findall(r"Those of ((?:`\w+`(?:,| and)?\s+)+)have\s+none", text)
    needy = set()
    for word, values in re.findall(r"^\| (architecture|`\w+=`) \| (.*) \|$", text, re.MULTILINE):
        for value in re.findall(r"`([^`]+)`", values):
            name = value.partition("(")[0]
            try:
                assert parsed(word, name) == parsed(word, value), value
            except UsageError:
                needy.add(name)
    assert set(re.findall(r"`(\w+)`", sentence)) == needy


def test_the_default_of_every_word_comes_first_in_the_readme() -> None:
    rows = re.findall(r"^\| (?:architecture|`\w+=`) \| `(\w+)`", (ROOT / "README.md").read_text(), re.MULTILINE)
    defaults: list[Part] = [part for _, part in Strategy().parts()]
    assert rows == [part.name for part in defaults]


def row_of_codec(text: str) -> str:
    """What the registry says of a codec, as a row of docs/concepts/codecs.md."""
    spec = Spec("weight", (1024, 1024))
    codec: Codec = build("codecs", read_part(text))
    bits = 8 * codec.wire_bytes(spec)[0] / spec.elements
    feedback = ("automatic" if codec.biased else "possible") if codec.contraction else "refused"
    return f"| `{text}` | {bits:.3g} | {codec.combine} | {feedback} |"


def test_the_table_of_codecs_is_what_the_registry_says() -> None:
    """Syncline's own codecs all have a row; one of another package needs none, ``syncline strategies`` lists all."""
    page = SITE["codecs"].read_text()
    found = re.findall(r"^(\| `([^`]+)` \| [\d.]+ \| \w+ \| \w+ \|)$", page, re.MULTILINE)
    own = [text for text in every_codec() if registry.get("codecs", text.partition("(")[0]).own]
    assert set(own) <= {text for _, text in found}
    assert all(f"`{entry.name}" in page for entry in registry.entries("codecs") if entry.own)
    for row, text in found:
        assert row == row_of_codec(text)
