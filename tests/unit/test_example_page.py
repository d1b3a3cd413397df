"""docs/layers/example.md: eight tokens followed through every layer. Its code runs, and prints what the page says."""

import doctest
import re
from pathlib import Path

import pytest
import torch

import longspan as ls

PAGE = Path(__file__).parents[2] / "docs" / "layers" / "example.md"
TEXT = PAGE.read_text()
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def fences(language):
    """(line of the page, text) of every block in a language."""
    return [(TEXT[: m.start(2)].count("\n"), m[2]) for m in FENCE.finditer(TEXT) if m[1] == language]


def examples():
    """The page as one session: names of one block are known in the next."""
    parser = doctest.DocTestParser()
    made = [(line, example) for line, text in fences("pycon") for example in parser.get_examples(text)]
    for line, example in made:
        example.lineno += line
    return [example for _, example in made]


def failures(session):
    """(number of examples that printed something else, report); compared letter for letter, as no option is set."""
    report = []
    test = doctest.DocTest(session, {}, "example.md", str(PAGE), 0, None)
    return doctest.DocTestRunner(verbose=False).run(test, out=report.append).failed, "".join(report)


def test_the_page_prints_what_it_says():
    failed, report = failures(examples())
    assert not failed, report


def test_a_page_that_says_something_else_is_noticed():
    session = examples()
    shown = [example for example in session if example.want]
    for example in shown:
        example.want = re.sub(r"(\S)(\s*)$", r"\1~\2", example.want)
    assert len(shown) > 20
    assert failures(session)[0] == len(shown)


def test_every_block_of_code_is_in_the_session():
    assert {m[1] for m in FENCE.finditer(TEXT)} == {"pycon", "text"}
    assert TEXT.count(">>> ") == len(examples())


@pytest.fixture(scope="module")
def plan():
    mask = ls.masks.documents([3, 5]) & ls.masks.sliding_window(2)
    layout = ls.layouts.Layout.from_spans(8, [[(0, 3), (7, 8)], [(3, 7)]])
    sizes = {"q_heads": 1, "kv_heads": 1, "head_dim": 1, "dtype": torch.float64}
    return ls.plan(mask, layout, scheme="exchange", **sizes)


def test_the_drawn_map_has_the_plans_numbers(plan):
    ((_, drawn),) = fences("text")
    table = {line.split()[0]: line.split()[1:] for line in drawn.splitlines()[:3]}
    assert table["token"] == [str(token) for token in range(8)]
    assert table["rank"] == [str(plan.layout.owner(token)) for token in range(8)]
    for a in range(8):
        for b in range(a, min(a + 3, 8)):
            assert plan.mask.allows(b, a) == (table["document"][a] == table["document"][b])
    pairs = re.findall(r"^rank (\d) +(\d) pairs +(\d) pairs$", drawn, re.MULTILINE)
    assert [int(rank) for rank, *_ in pairs] == [0, 1]
    for rank, *counts in pairs:
        steps = plan.schedule().ranks[int(rank)]
        assert [sum(band.area for compute in step.computes for band in compute.bands) for step in steps] == [
            int(count) for count in counts
        ]
    (_, transfer), *more = plan.schedule().transfers()
    assert not more
    tokens, size = re.search(r"K and V of ([\d ]+): (\d+) bytes", drawn).groups()
    sent = [token for span in transfer.piece.spans for token in range(span.start, span.stop)]
    assert sent == [int(token) for token in tokens.split()]
    assert int(size) == transfer.piece.num_bytes(plan.sizes)
    assert (transfer.src, transfer.dst) == (1, 0)  # the arrow points up
