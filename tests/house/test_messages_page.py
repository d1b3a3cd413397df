"""The page of error messages: each one that it quotes is in the source, with its words in their order."""

import ast
import difflib
import re
from functools import cache

from tests.house.test_docs import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"^### `(.+)`$", re.M)


@cache
def texts():
    """All texts of the source, with a mark where something is filled in."""
    found = set()
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                parts = [str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values]
                found.add("".join(parts))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found.add(node.value)
    return found


def is_printed(quoted):
    """Whether a text of the source reads so, with anything where the quote has dots.

    >>> is_printed("... has no truth value"), is_printed("... has no truthful value")
    (True, False)
    """
    begin = r"(\0 )?" if quoted.startswith("... ") else ""  # who it is about may be put before it elsewhere
    parts = [re.escape(part.strip(" ")) for part in quoted.removeprefix("... ").split("...")]
    pattern = re.compile(begin + r"[ ]?\0[ ]?".join(parts))
    return any(pattern.match(text) for text in texts())


def nearest(quoted):
    """Return the beginning of the most similar message in the source, as the page would quote it.

    >>> nearest("... has no truthful value").startswith("... has no truth value")
    True
    """
    shown = (" ".join(text.replace("\0", " ... ").split())[: len(quoted) + 8] for text in texts() if len(text) > 12)
    return difflib.get_close_matches(quoted, shown, 1, 0.0)[0].rstrip(" .,:")


def test_every_quoted_message_is_in_the_source():
    quoted = QUOTED.findall(PAGE.read_text())
    assert len(quoted) >= 30
    assert len(set(quoted)) == len(quoted)
    gone = [f"{each}\n  nearest in the source: {nearest(each)}" for each in quoted if not is_printed(each)]
    assert not gone, "\n".join(gone)


def test_what_is_not_in_the_source_is_found():
    assert not is_printed("the plan is for ... devices, so it needs group=")
    assert not is_printed("so it needs group=")  # not its first words


def test_every_heading_is_a_quoted_message():
    headings = re.findall(r"^### (.+)$", PAGE.read_text(), re.M)
    assert headings == [f"`{each}`" for each in QUOTED.findall(PAGE.read_text())]
