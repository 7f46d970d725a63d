"""Each parser of bytes or text of others meets some inputs that are nearly valid. ``make fuzz`` tries a million."""

from __future__ import annotations

import pytest
from fuzzing import fuzz
from parsers import PARSERS, Parser


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.name)
def test_any_input_is_parsed_or_refused_with_the_named_error(parser: Parser) -> None:
    assert fuzz(parser, round(200 * parser.weight)) == []
