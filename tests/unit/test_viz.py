"""The three pictures: drawn, not blank, legible, and with the plan's own figures; and what notebooks show."""

import base64
import io
import itertools
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.cli.workload import drawn_lengths
from longspan.errors import LongspanError, PlanError
from longspan.formatting import bytes_text
from longspan.masks.tiles import tile_pairs
from longspan.viz import layout_picture, mask_picture, memory_picture, page_html, timeline_picture
from longspan.viz.pictures import (
    FAR,
    INK,
    SERIES,
    even_edges,
    held_tokens,
    owners,
    rank_colors,
    row_work,
    runs,
    stretches,
    tile_shares,
)

pytest.importorskip("matplotlib")

SIZES = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
HOSTILE = "</script><img src=x onerror=alert(1)>\"'& costs $5 and $6"


def made(lengths, ranks, **more):
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    return ls.plan(mask, ls.layouts.balanced(mask, world_size=ranks), **SIZES, **more)


PLANS = {
    "1k on 4": lambda: made([300, 420, 180, 124], 4, scheme="exchange"),
    "1k on 1": lambda: made([300, 724], 1),
    "1M on 8": lambda: made(drawn_lengths("longtail", 1 << 20), 8),
    "1M on 64": lambda: made(drawn_lengths("longtail", 1 << 20), 64),
}
_made = {}


@pytest.fixture(params=PLANS)
def plan(request):
    if request.param not in _made:
        _made[request.param] = PLANS[request.param]()
    return _made[request.param]


def pixels(figure, dpi=80):
    import matplotlib.image

    file = io.BytesIO()
    figure.savefig(file, format="png", dpi=dpi)
    file.seek(0)
    return (matplotlib.image.imread(file)[..., :3] * 255).round().astype(int)


def colors_in(figure, dpi=80):
    """How many pixels have which colour."""
    flat = pixels(figure, dpi).reshape(-1, 3) @ [65536, 256, 1]
    values, counts = np.unique(flat, return_counts=True)
    return dict(zip((f"#{value:06x}" for value in values), counts.tolist(), strict=True))


def words_of(figure):
    return " ".join(" ".join(text.get_text().split()) for text in texts_of(figure))


def check_drawn(figure):
    """Not blank, with everything inside the figure, and text that is large enough to be read."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    assert len(colors_in(figure)) > 12
    box = figure.get_tightbbox(FigureCanvasAgg(figure).get_renderer())
    assert min(box.x0, box.y0) >= -0.02
    assert (np.array([box.x1, box.y1]) <= figure.get_size_inches() + 0.02).all()
    assert all(text.get_fontsize() >= 8 for text in texts_of(figure) if text.get_text().strip())


def texts_of(figure):
    return figure.findobj(lambda artist: hasattr(artist, "get_text") and hasattr(artist, "get_fontsize"))


def pictures(plan):
    return {
        "mask": mask_picture(plan.mask, plan.layout),
        "layout": layout_picture(plan.layout, plan.mask),
        "timeline": timeline_picture(plan),
        "memory": memory_picture(plan),
    }


def test_every_picture_is_drawn(plan):
    for figure in pictures(plan).values():
        check_drawn(figure)


# -- masks and layouts -------------------------------------------------------------------------------------------------


def test_a_mask_is_drawn_in_the_colours_of_its_ranks():
    """Four documents of one rank each: a triangle of each colour, with half of its square's pixels."""
    mask = ls.masks.documents([256] * 4) & ls.masks.causal()
    found = colors_in(mask_picture(mask, ls.layouts.contiguous(1024, 4)), 150)
    areas = np.array([found.get(color, 0) for color in SERIES[:4]])
    assert (areas > 0.85 * areas.max()).all()
    assert areas.min() > 5000
    assert found["#ffffff"] > 5 * areas.sum()
    assert not any(color in found for color in SERIES[4:])


def test_mask_pictures_say_how_much_is_allowed(plan):
    share = 100 * plan.mask.area() / plan.layout.seq_len**2
    words = words_of(mask_picture(plan.mask, plan.layout))
    assert f"{share:.3g}% of all pairs allowed" in words
    assert f"most pairs on a rank / mean: {plan.imbalance:.3f}" in words


def test_functions_are_asked_in_pictures_of_short_sequences_only():
    every_third = ls.masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 == 0, 60, within=ls.masks.causal())
    at = np.arange(60)
    share = 100 * every_third.allows(at[:, None], at[None, :]).mean()
    words = words_of(mask_picture(every_third, ls.layouts.zigzag(60, 2)))
    assert f"{share:.3g}% of all pairs allowed" in words
    assert "a function decides" not in words
    assert "of pairs" not in words.replace("of all pairs", "")  # the work of ranks is not known
    assert "a function decides" in words_of(mask_picture(every_third, ask=False))

    def never(b, h, q, kv):
        raise AssertionError("asked")

    long = ls.masks.from_mask_mod(never, 1 << 20, within=ls.masks.causal())
    assert "a function decides" in words_of(mask_picture(long))
    assert "<img" in ls.masks.from_mask_mod(never, 100)._repr_html_()


def test_rows_and_heads_are_drawn_one_by_one():
    mask = ls.masks.per_head(ls.masks.causal(), ls.masks.sliding_window(7))
    words = [words_of(mask_picture(mask, seq_len=64, head=head)) for head in (0, 1)]
    assert "head 1 of 2" in words[1]
    assert words[0].split("% of all")[0] != words[1].split("% of all")[0]


def test_a_layout_is_drawn_in_lanes():
    """Every rank holds a quarter of the tokens, so a quarter of its lane has its colour."""
    found = colors_in(layout_picture(ls.layouts.zigzag(1024, 4)), 150)
    areas = np.array([found[color] for color in SERIES[:4]])
    assert areas == pytest.approx(areas.mean(), rel=0.05)
    assert found["#e6e9ed"] == pytest.approx(3 * areas.sum(), rel=0.05)
    words = words_of(layout_picture(ls.layouts.zigzag(1024, 4)))
    assert "rank 3: 256 tokens" in words
    check_drawn(layout_picture(ls.layouts.striped(100_000, 8)))


def test_many_ranks_are_drawn_in_part():
    plan = made([4000, 96], 200, scheme="ring")
    with pytest.raises(PlanError, match=r"`plan` .*128.*200"):
        timeline_picture(plan)
    check_drawn(mask_picture(plan.mask, plan.layout))
    assert "64 of 200 ranks are drawn" in words_of(layout_picture(plan.layout))


# -- closed form -------------------------------------------------------------------------------------------------------

lengths_strategy = st.lists(st.integers(1, 12), min_size=1, max_size=6)


@settings(max_examples=150, deadline=None)
@given(lengths_strategy, st.integers(0, 9), st.booleans(), st.data())
def test_tiles_count_like_brute_force(lengths, window, prefix, data):
    seq_len = sum(lengths)
    mask = ls.masks.documents(lengths) & ls.masks.sliding_window(window)
    mask = mask | ls.masks.global_prefix(2) if prefix else mask
    cuts = st.sets(st.integers(0, seq_len), max_size=6).map(lambda some: np.array(sorted({0, seq_len, *some})))
    q_edges, kv_edges = data.draw(cuts), data.draw(cuts)
    at = np.arange(seq_len)
    allowed = mask.resized(seq_len).allows(at[:, None], at[None, :])
    expected = [
        [int(allowed[a:b, c:d].sum()) for c, d in itertools.pairwise(kv_edges)] for a, b in itertools.pairwise(q_edges)
    ]
    assert tile_pairs(mask.resized(seq_len).plane(0, 0).sure, q_edges, kv_edges).tolist() == expected


@settings(max_examples=60, deadline=None)
@given(lengths_strategy, st.integers(1, 5))
def test_owners_work_and_stretches_like_brute_force(lengths, ranks):
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    seq_len = sum(lengths)
    layout = ls.layouts.balanced(mask, world_size=ranks)
    owner = layout.owner(np.arange(seq_len))
    edges = even_edges(seq_len, 5)
    held = [[int((owner[a:b] == rank).sum()) for a, b in itertools.pairwise(edges)] for rank in range(ranks)]
    assert held_tokens(layout, edges).tolist() == held
    for (a, b), found in zip(itertools.pairwise(edges), owners(layout, edges).tolist(), strict=True):
        counts = np.bincount(owner[a:b], minlength=ranks)
        assert found == (int(counts.argmax()) if 2 * counts.max() > b - a else -1)
    at = np.arange(seq_len)
    pairs = mask.allows(at[:, None], at[None, :]).sum(axis=1)
    assert row_work(mask, layout, 0, 0).tolist() == [int(pairs[owner == rank].sum()) for rank in range(ranks)]
    ends = np.cumsum(lengths)
    assert stretches(mask, seq_len)[:, 1].tolist() == ends.tolist()
    q_edges, k_edges, share, _ = tile_shares(mask, layout, seq_len)
    assert np.diff(q_edges) @ share @ np.diff(k_edges) == pytest.approx(pairs.sum())


# -- plans -------------------------------------------------------------------------------------------------------------


def bars_of(figure):
    """(left, width, colour) of every bar of a timeline, by pass."""
    return [
        [
            (*path.get_extents().bounds[::2], tuple(shapes.get_facecolor()[n % len(shapes.get_facecolor())]))
            for shapes in axes.collections
            for n, path in enumerate(shapes.get_paths())
        ]
        for axes in figure.axes
    ]


def test_timeline_bars_are_the_events():
    plan = PLANS["1k on 4"]()
    for run, bars in zip(runs(plan), bars_of(timeline_picture(plan)), strict=True):
        events = [(e.start, e.stop - e.start) for e in run.timeline.events if e.kind in ("compute", "message")]
        whole = [(0.0, run.timeline.seconds)] * 4  # the lanes
        weight = run.timeline.seconds / max(width for left, width, _ in bars if left == 0)
        found = sorted((left * weight, width * weight) for left, width, _ in bars)
        assert np.array(found) == pytest.approx(np.array(sorted([*events, *whole])), rel=1e-6, abs=1e-12)


def test_steps_end_when_the_simulator_says(plan):
    for run in runs(plan):
        assert [times[-1] for times in run.left] == pytest.approx(run.timeline.finished, rel=1e-12)


def test_messages_between_nodes_have_a_colour_of_their_own():
    figures = [timeline_picture(_made.setdefault(name, PLANS[name]())) for name in ("1M on 8", "1M on 64")]
    assert ["messages between nodes" in words_of(figure) for figure in figures] == [False, True]
    assert [FAR in colors_in(figure, 120) for figure in figures] == [False, True]


def test_memory_peaks_are_the_plans(plan):
    both = runs(plan)
    peaks = [plan.peak_bytes(rank) for rank in range(plan.layout.world_size)]
    assert [max(int(run.alive[r].max(initial=0)) for run in both) for r in range(len(peaks))] == peaks
    words = words_of(memory_picture(plan))
    assert f"Peak {bytes_text(max(peaks))} on rank {peaks.index(max(peaks))}" in words


@pytest.mark.parametrize("ranks", [4, 16])
def test_the_limit_of_a_device_is_a_line(ranks):
    plan = made([3000, 4200, 1800, 7384], ranks, scheme="exchange")
    peak = max(plan.peak_bytes(rank) for rank in range(ranks))

    def limits(figure):
        return [line.get_ydata()[0] for axes in figure.axes for line in axes.lines if line.get_color() == INK]

    assert not limits(memory_picture(plan))
    for limit in (peak // 2, peak, peak * 3):
        figure = memory_picture(plan, limit_bytes=limit)
        check_drawn(figure)
        at, low_high = limits(figure), figure.axes[0].get_ylim()
        assert len(at) == 2  # in both passes
        assert low_high[0] <= at[0] <= low_high[1]
        unit = re.search(r"alive, (\w+)", words_of(figure))[1]
        assert at[0] * {"KiB": 1 << 10, "MiB": 1 << 20}[unit] == pytest.approx(limit)
        assert f"{bytes_text(limit)} left for it (the dashed line)" in words_of(figure)
    far = memory_picture(plan, limit_bytes=peak * 100)
    assert "left for it (beyond this picture)" in words_of(far)
    assert not limits(far)
    for wrong in (0, -1, 1.5, "80G"):
        with pytest.raises(PlanError, match="limit_bytes"):
            memory_picture(plan, limit_bytes=wrong)


# -- notebooks and pages -----------------------------------------------------------------------------------------------


def images_of(text):
    found = re.findall(r'<img alt="" src="data:image/png;base64,([^"]+)">', text)
    assert all(base64.b64decode(data).startswith(b"\x89PNG") for data in found)
    return found


def test_notebooks_show_pictures():
    plan = PLANS["1k on 4"]()
    for value in (ls.masks.causal(), plan.mask, plan.layout, plan):
        text = value._repr_html_()
        assert len(images_of(text)) == 1
        assert len(text) < 200_000
    for reason in plan.reasons:
        assert f"<td>{reason.scheme}</td>" in plan._repr_html_()
    scan = ls.scan_plan(plan.mask, plan.layout, heads=2, keys=16, values=16, maps="matrix")
    assert scan.scheme in scan._repr_html_()
    code = "import sys, longspan; assert not any('viz' in name for name in sys.modules), 'loaded too early'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_pictures_without_matplotlib_are_refused(monkeypatch):
    layout = ls.layouts.contiguous(16, 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda: layout_picture(layout), lambda: mask_picture(ls.masks.causal(16))):
        with pytest.raises(LongspanError, match=r"`matplotlib` is required .*pip install matplotlib"):
            draw()
    shown = layout._repr_html_()  # a notebook shows at least the text
    assert "&lt;layout contiguous" in shown
    assert "pip install" in shown


def test_names_are_escaped_in_html_and_no_formulas_in_pictures():
    mask = ls.masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 64, name=HOSTILE)
    layout = ls.layouts.Layout.from_spans(64, [[(0, 30)], [(30, 64)]], name=HOSTILE)
    for figure in (mask_picture(mask), layout_picture(layout, title="costs $5 and $6")):
        check_drawn(figure)
        assert "costs $5 and $6" in words_of(figure)
    page = page_html(HOSTILE, [layout_picture(layout)], HOSTILE)
    assert len(images_of(page)) == page.count("<img") == 1
    assert "<script" not in page
    for value in (mask, layout):
        assert value._repr_html_().count("<img") == 1


def test_colours_of_ranks_differ_and_keep_their_order():
    for size in (4, 8, 21, 64):
        colors = np.array(rank_colors(size))
        assert len(np.unique(colors, axis=0)) == size
        light = colors @ [0.2126, 0.7152, 0.0722]
        assert size <= 8 or (np.diff(light) > 0).all()
        assert light.max() < 0.8  # on white paper


def test_pictures_of_the_documentation_are_there():
    images = Path(__file__).parents[2] / "docs" / "images"
    import matplotlib.image

    for name in ("mask", "layout", "timeline", "memory"):
        assert len(np.unique(matplotlib.image.imread(images / f"{name}.png").reshape(-1, 3), axis=0)) > 12
