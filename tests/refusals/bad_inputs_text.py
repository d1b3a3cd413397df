"""Hostile texts: layouts and schedules that somebody else wrote."""

from functools import cache

from longspan import LayoutError, LongspanError, ScheduleError, layouts, masks, plan
from longspan.layouts import Layout
from longspan.planning import validate
from longspan.planning.steps import parse_schedule
from tests.refusals.bad_inputs import bad

LAYOUT = "layout zigzag seq_len=8 world_size=2\n0: 0:2 6:8\n1: 2:6"


@cache
def text(direction="forward"):
    """A real schedule's text, to be spoiled."""
    made = plan(masks.causal(), layouts.zigzag(8, 2), q_heads=2, kv_heads=2, head_dim=4, dtype="float32", scheme="ring")
    return made.schedule(direction).text()


def spoiled(old, new, direction="forward"):
    """The text with the first of something replaced; it must be there."""
    good = text(direction)
    assert old in good, f"{old!r} is not in the text"
    return good.replace(old, new, 1)


LAYOUTS = {
    "empty": ("", "a layout text begins", "''"),
    "blank lines": ("\n\n\n", "a layout text begins", "''"),
    "no word": (LAYOUT.removeprefix("layout "), "a layout text begins", "zigzag"),
    "no size": ("layout a seq_len=8\n0: 0:8", "a layout text begins", "seq_len=8"),
    "an unknown field": ("layout a seq_len=8 world_size=1 evil=1\n0: 0:8", "a layout text begins", "evil=1"),
    "a field twice": ("layout a seq_len=8 world_size=1 seq_len=9\n0: 0:8", "a layout text begins", "seq_len=9"),
    "more words": ("layout a b seq_len=8 world_size=1\n0: 0:8", "a layout text begins", "layout a b"),
    "a negative size": ("layout a seq_len=-8 world_size=1\n0: 0:8", "1 to 13 digits", "seq_len=-8"),
    "a float": ("layout a seq_len=8.0 world_size=1\n0: 0:8", "1 to 13 digits", "seq_len=8.0"),
    "an exponent": ("layout a seq_len=1e9 world_size=1\n0: 0:8", "1 to 13 digits", "seq_len=1e9"),
    "underscores": ("layout a seq_len=1_0 world_size=1\n0: 0:10", "1 to 13 digits", "seq_len=1_0"),
    "5,000 digits": (f"layout a seq_len={'9' * 5000} world_size=1\n0: 0:8", "1 to 13 digits", "..."),
    "a huge length": ("layout a seq_len=9999999999999 world_size=1\n0: 0:8", "seq_len = 9999999999999", "at most"),
    "many ranks": ("layout a seq_len=8 world_size=9999999999999\n0: 0:8", "for 9999999999999 ranks", "lines for 1"),
    "few lines": ("layout a seq_len=8 world_size=3\n0: 0:8", "for 3 ranks, but has lines for 1"),
    "another order": ("layout a seq_len=8 world_size=2\n1: 0:4\n0: 4:8", "line 2 of a layout text begins '0:'", "'1:"),
    "no label": ("layout a seq_len=8 world_size=1\n0:8", "a span is written start:stop", "'8'"),
    "a gap": ("layout a seq_len=8 world_size=1\n0: 0:4 5:8", "no rank holds position 4"),
    "an overlap": ("layout a seq_len=8 world_size=1\n0: 0:5 4:8", "two ranks hold position 4"),
    "backwards": ("layout a seq_len=8 world_size=1\n0: 8:0", "0 <= start <= stop", "start = 8 and stop = 0"),
    "a huge span": ("layout a seq_len=8 world_size=1\n0: 0:9999999999999", "0 <= start <= stop", "9999999999999"),
    "words": ("layout a seq_len=8 world_size=1\n0: all", "a span is written start:stop", "'all'"),
    "few slots": ("layout a seq_len=8 world_size=1 local_len=3\n0: 0:8", "rank 0 holds 8 tokens"),
    "a NUL": (LAYOUT.replace("zigzag", "zig\0zag"), "'\\x00' at character 10", "printable ASCII"),
    "an escape": (LAYOUT.replace("zigzag", "\x1b[2J"), "'\\x1b' at character 7", "printable ASCII"),
    "unicode digits": (LAYOUT.replace("8", "٨"), "'٨' at character", "printable ASCII"),
    "a bidi name": (LAYOUT.replace("zigzag", "\u202ea"), "at character 7", "printable ASCII"),
    "a tab": (LAYOUT.replace(" ", "\t"), "'\\t' at character", "printable ASCII"),
    "carriage returns": (LAYOUT.replace("\n", "\r\n"), "'\\r' at character", "printable ASCII"),
    "bytes": (LAYOUT.encode(), "must be a str, but got bytes"),
    "nothing": (None, "must be a str, but got NoneType"),
    "a code": ("__import__('os').system('true')", "a layout text begins", "__import__"),
    "too long": ("x" * ((64 << 20) + 1), "67108865 characters", "the limit is 67108864"),
}

SCHEDULES = {
    "empty": (lambda: "", "a schedule text begins", "''"),
    "one word": (lambda: "schedule", "a schedule text begins", "'schedule'"),
    "another word": (lambda: spoiled("schedule", "pickle"), "a schedule text begins", "pickle"),
    "no sizes": (lambda: spoiled(" q_heads=2", ""), "sizes are written q_heads=N", "kv_heads=2"),
    "more sizes": (lambda: spoiled("q_heads=2", "q_heads=2 evil=1"), "sizes are written q_heads=N", "evil=1"),
    "a negative size": (lambda: spoiled("q_heads=2", "q_heads=-2"), "1 to 13 digits", "q_heads=-2"),
    "zero heads": (lambda: spoiled("q_heads=2", "q_heads=0"), "q_heads = 0", "at least 1"),
    "a huge size": (lambda: spoiled("head_dim=4", "head_dim=9999999999"), "head_dim = 9999999999", "at most 16777216"),
    "heads that share": (lambda: spoiled("kv_heads=2", "kv_heads=3"), "leaves 2 over", "multiple of"),
    "sideways": (lambda: spoiled("forward", "sideways"), "'forward' or 'backward'", "'sideways'"),
    "no layout": (lambda: spoiled("layout zigzag", "layers zigzag"), "a layout text begins", "layers"),
    "rank 1 first": (lambda: spoiled("rank 0", "rank 1"), "line 5", "rank 0 comes next"),
    "rank twice": (lambda: spoiled("rank 1", "rank 0"), "rank 1 comes next"),
    "no ranks": (lambda: text().split("rank 0")[0], "2 ranks", "steps for 0"),
    "three ranks": (lambda: text() + "\nrank 2\n  step 0", "there are 2 ranks at most"),
    "step 7": (lambda: spoiled("step 0", "step 7"), "line 6", "step 0 comes next"),
    "step -1": (lambda: spoiled("step 0", "step -1"), "step 0 comes next"),
    "no step": (lambda: spoiled("  step 0\n", ""), "'step 0' comes before transfers"),
    "kept in forward": (
        lambda: spoiled("  step 0", "  kept kv[0:2]h0:2\n  step 0"),
        "no 'kept' lines",
        "Take them out",
    ),
    "words": (lambda: text() + "\n    hello", "cannot be read", "a transfer is written SRC>DST"),
    "code": (lambda: text() + "\n    eval('1')", "cannot be read", "a transfer is written SRC>DST"),
    "another rank's transfer": (lambda: spoiled("0>1", "1>1"), "to or receives from another rank"),
    "a rank beyond": (lambda: spoiled("0>1", "0>7"), "ranks run from 0 to 1"),
    "a huge rank": (lambda: spoiled("0>1", "0>" + "9" * 30), "a transfer is written SRC>DST", "1 to 13 digits"),
    "a negative rank": (lambda: spoiled("0>1", "0>-1"), "a transfer is written SRC>DST", "1 to 13 digits"),
    "until never": (lambda: spoiled("until 1", "until 9999999"), "steps up to 65536"),
    "until words": (lambda: spoiled("until 1", "until then"), "a transfer is written SRC>DST", "1 to 13 digits"),
    "a recall": (lambda: spoiled("keep", "never"), "a transfer is written SRC>DST"),
    "a role": (lambda: spoiled("kv[", "kw["), "a piece is written role[spans]hHEADS", "kw["),
    "no heads": (lambda: spoiled("]h0:2 until", "] until"), "a piece is written role[spans]hHEADS"),
    "heads beyond": (lambda: spoiled("]h0:2 until", "]h0:3 until"), "heads of kv must be", "within 0:2"),
    "no head": (lambda: spoiled("]h0:2 until", "]h1:1 until"), "heads of kv must be", "but got 1:1"),
    "batch rows": (lambda: spoiled("]h0:2 until", "]h0:2b0:9 until"), "batch rows must be", "within 0:1"),
    "positions beyond": (lambda: spoiled("kv[0:2", "kv[0:9"), "positions must be", "within 0:8"),
    "a huge position": (lambda: spoiled("kv[0:2", "kv[0:" + "9" * 400), "a span is written start:stop"),
    "a backward span": (lambda: spoiled("kv[0:2", "kv[2:0"), "0 <= start <= stop"),
    "a compute of q and q": (lambda: spoiled("compute q[", "compute out["), "works on q and kv pieces"),
    "a compute of nothing": (lambda: spoiled(" : ", " ; "), "a compute is written compute Q KV : BANDS"),
    "bands beyond": (lambda: spoiled(" : 0:2x", " : 0:99x"), "positions must be", "within 0:8"),
    "a bound": (lambda: spoiled("/0..", "/zero.."), "a band is written Q x KV / LO..HI"),
    "a NUL": (lambda: spoiled("ring", "ri\0ng"), "'\\x00' at character 11", "printable ASCII"),
    "unicode": (lambda: spoiled("ring", "rіng"), "at character 10", "printable ASCII"),
    "bytes": (lambda: text().encode(), "must be a str, but got bytes"),
    "a long line": (lambda: text() + "\n    " + "0:1 " * (1 << 18) + "0:1", "the limit is 1048576"),
    "a deep line": (lambda: text() + "\n" + "(" * 100_000, "cannot be read", "SRC>DST"),
    "too long": (lambda: "x" * ((64 << 20) + 1), "67108865 characters", "the limit is 67108864"),
}

# Texts that are well formed and wrong: the proof finds them.
LIES = {
    "a transfer only one end knows": ("0>1 kv[0:2", "0>1 kv[1:2"),
    "a pair computed twice": (" : ", " : 6:8x0:2 "),
    "until before it arrives": ("until 1", "until 0"),
}


def rows():
    for name, (given, *says) in LAYOUTS.items():
        error = LongspanError if "start" in says[0] else LayoutError
        yield bad(f"layout {name}", lambda g=given: Layout.parse(g), error, *says)
    for name, (make, *says) in SCHEDULES.items():
        error = LongspanError if "layout" in says[0] else ScheduleError
        yield bad(f"schedule {name}", lambda m=make: parse_schedule(m()), error, *says)
    for name, change in LIES.items():
        call = lambda c=change: validate(parse_schedule(spoiled(*c)), masks.causal())  # noqa: E731
        yield bad(f"schedule {name}", call, ScheduleError, "ring forward: rank", "step")
