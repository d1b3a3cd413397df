"""Pictures: drawn, well-formed, on their paper, not blank, and showing the plan's own figures."""

import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import longspan as ls
from longspan.cli import main
from longspan.cli.workload import drawn_lengths
from longspan.errors import LongspanError, PlanError
from longspan.formatting import bytes_text, three_digits
from longspan.masks.tiles import tile_pairs
from longspan.planning.problem import Problem
from longspan.planning.steps import Sizes
from longspan.viz import (
    ScalingPoint,
    Scene,
    bars_picture,
    layout_picture,
    mask_picture,
    memory_picture,
    picture_page,
    scaling_picture,
    scaling_points,
    scan_picture,
    timeline_picture,
    traffic,
    traffic_picture,
    write_png,
)
from longspan.viz.mask_and_layout import even_edges, owner_edges, owners, row_work, stretches
from longspan.viz.plan_pictures import runs
from longspan.viz.scene import INK, ROLES, SERIES, rank_color

pytest.importorskip("matplotlib")

SIZES = {"q_heads": 8, "kv_heads": 2, "head_dim": 64, "dtype": "bfloat16"}
HOSTILE = "</script><img src=x onerror=alert(1)>\"'&\x1b\x00"
SVG = "{http://www.w3.org/2000/svg}"


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


def scenes(plan):
    return {
        "mask": mask_picture(plan.mask, plan.layout),
        "layout": layout_picture(plan.layout, plan.mask),
        "timeline": timeline_picture(plan),
        "traffic": traffic_picture(plan),
        "memory": memory_picture(plan),
    }


def texts(scene: Scene) -> list:
    """Return the text objects that are visible."""
    found = scene.figure.findobj(lambda artist: hasattr(artist, "get_text") and hasattr(artist, "get_window_extent"))
    return [text for text in found if text.get_text().strip() and text.get_visible()]


def words_of(scene: Scene) -> str:
    return " ".join(text.get_text() for text in texts(scene))


def boxes_of(scene: Scene) -> list[tuple[str, object]]:
    """Return (tooltip, patch) of every box with a tooltip."""
    patches = scene.figure.findobj(lambda artist: str(artist.get_gid() or "").startswith("note"))
    return [(scene.notes[int(patch.get_gid()[4:])], patch) for patch in patches]


def check_drawn(scene: Scene) -> ET.Element:
    """Well-formed, titled, with every text inside the paper, upon no other text and large enough to be read."""
    root = ET.fromstring(scene.svg())
    assert root.tag == f"{SVG}svg"
    assert root.findtext(f"{SVG}title")
    assert root.findtext(f"{SVG}desc")
    drawn = texts(scene)
    assert all(text.get_fontsize() >= 9 for text in drawn)
    boxes = np.array([text.get_window_extent().extents for text in drawn])
    assert (boxes[:, :2] >= -1).all(), drawn[int(boxes[:, :2].min(axis=1).argmin())]
    assert (boxes[:, 2] <= scene.width + 1).all(), drawn[int(boxes[:, 2].argmax())]
    assert (boxes[:, 3] <= scene.height + 1).all(), drawn[int(boxes[:, 3].argmax())]
    low = np.maximum(boxes[:, None, :2], boxes[None, :, :2])
    shared = np.minimum(boxes[:, None, 2:], boxes[None, :, 2:]) - low
    upon = np.argwhere(np.triu((shared > 1.5).all(axis=2), 1))
    assert not len(upon), [(drawn[i].get_text(), drawn[j].get_text()) for i, j in upon[:5]]
    assert len(root.findall(f".//{SVG}g/{SVG}title")) == len(scene.notes)
    return root


def read_png(path):
    imread = pytest.importorskip("matplotlib.image").imread

    return np.asarray(imread(path))


def is_blank(pixels) -> bool:
    flat = (pixels[..., :3].reshape(-1, 3) * 255).round().astype(np.int64)
    return len(np.unique(flat @ [65536, 256, 1])) < 12 or float(flat.std()) < 5


def test_every_picture_is_drawn(plan):
    for scene in scenes(plan).values():
        check_drawn(scene)
        assert len(scene.svg()) < 1_000_000


def test_every_picture_as_png(tmp_path):
    pytest.importorskip("matplotlib")
    plan = PLANS["1k on 4"]()
    drawn = scenes(plan)
    drawn["scaling"] = scaling_picture(scaling_points(plan.mask, (2, 4), **SIZES))
    for name, scene in drawn.items():
        path = tmp_path / f"{name}.png"
        write_png(scene, path, scale=1)
        pixels = read_png(path)
        assert abs(pixels.shape[0] - scene.height) <= 1
        assert abs(pixels.shape[1] - scene.width) <= 1
        assert not is_blank(pixels), name
    write_png(Scene(200, 100, "nothing"), tmp_path / "blank.png", scale=1)
    assert is_blank(read_png(tmp_path / "blank.png"))


def test_pictures_without_matplotlib_are_refused(monkeypatch):
    layout = ls.layouts.contiguous(16, 2)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for draw in (lambda: layout_picture(layout), lambda: mask_picture(ls.masks.causal(16)), lambda: Scene(9, 9, "x")):
        with pytest.raises(LongspanError, match=r"`matplotlib` is required .*pip install matplotlib"):
            draw()
    shown = layout._repr_html_()  # a notebook shows at least the text
    assert "&lt;layout contiguous" in shown
    assert "pip install matplotlib" in shown


def test_pictures_do_not_depend_on_the_users_settings():
    import matplotlib

    layout = ls.layouts.zigzag(64, 2)
    expected = layout_picture(layout, title="costs $5 and $6").svg()
    assert "costs $5 and $6" in expected
    with matplotlib.rc_context({"font.size": 30, "axes.grid": True, "figure.facecolor": "red", "svg.fonttype": "path"}):
        assert layout_picture(layout, title="costs $5 and $6").svg() == expected
        assert matplotlib.rcParams["font.size"] == 30


# -- the figures in the pictures are the plan's ---------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_traffic_sums_are_what_the_plan_receives(plan, direction):
    found = traffic(plan, direction)
    assert found.sum(axis=0).tolist() == [plan.bytes_received(r, direction) for r in range(plan.layout.world_size)]
    assert not np.diag(found).any()


def test_traffic_cells_show_their_bytes():
    plan = PLANS["1k on 4"]()
    matrices = [traffic(plan, direction) for direction in ("forward", "backward")]
    scene = traffic_picture(plan)
    most = max(int(m.max()) for m in matrices)
    words = [text.get_text() for text in texts(scene)]
    unit = 2**20 if most >= 2**20 else 2**10
    for matrix in matrices:
        for src, dst in np.argwhere(matrix).tolist():
            assert f"rank {src} to rank {dst}: {bytes_text(int(matrix[src, dst]))}" in scene.notes
            assert three_digits(int(matrix[src, dst]) / unit) in words
    darkest = [note for note, box in boxes_of(scene) if " to rank " in note and box.get_alpha() is None]
    assert [note.rsplit(": ")[1] for note in darkest] == [bytes_text(most)] * len(darkest)
    assert darkest


def test_memory_peaks_are_the_plans(plan):
    both = runs(plan)
    peaks = [plan.peak_bytes(rank) for rank in range(plan.layout.world_size)]
    assert [max(int(run.alive[r].max(initial=0)) for run in both) for r in range(len(peaks))] == peaks
    words = words_of(memory_picture(plan))
    assert f"peak {bytes_text(max(peaks))} on rank {peaks.index(max(peaks))}" in words


@pytest.mark.parametrize("ranks", [4, 16])
def test_the_limit_of_a_device_is_a_line(ranks):
    plan = made([3000, 4200, 1800, 7384], ranks, scheme="exchange")
    peak = max(plan.peak_bytes(rank) for rank in range(ranks))

    def dashed(scene):
        return [line for axes in scene.figure.axes for line in axes.lines if line.get_linestyle() == "--"]

    plain = memory_picture(plan)
    assert not [line for line in dashed(plain) if line.get_color() == INK]
    for limit in (peak // 2, peak, peak * 3):
        scene = memory_picture(plan, limit_bytes=limit)
        check_drawn(scene)
        lines = [line for line in dashed(scene) if line.get_color() == INK]
        assert len(lines) == 2 * (ranks if ranks <= 8 else 1)  # in both passes
        assert f"{bytes_text(limit)} left for it (the dashed line)" in words_of(scene)
        for line in lines:  # where a step of as many bytes would end
            low, high = sorted(line.axes.get_ylim())
            assert low <= line.get_ydata()[0] <= high
        if ranks > 8:
            assert {line.get_ydata()[0] for line in lines} == {limit}
    far = memory_picture(plan, limit_bytes=peak * 100)
    check_drawn(far)
    assert "left for it (beyond this picture)" in words_of(far)
    assert not [line for line in dashed(far) if line.get_color() == INK]
    for wrong in (0, -1, 1.5, "80G"):
        with pytest.raises(PlanError, match="limit_bytes"):
            memory_picture(plan, limit_bytes=wrong)


def test_a_limit_needs_a_picture_of_memory(tmp_path, capsys):
    words = ["--seq", "4k", "--ranks", "4", "--limit-bytes", "20M"]
    assert main(["show", "memory", *words, "--svg", str(tmp_path / "memory.svg")]) == 0
    assert "20.0 MiB" in (tmp_path / "memory.svg").read_text()
    for refused in (["show", "memory", *words], ["show", "mask", *words, "--svg", str(tmp_path / "mask.svg")]):
        assert main(refused) == 2
        assert "--limit-bytes needs a picture of memory" in capsys.readouterr().err


def test_steps_end_when_the_simulator_says(plan):
    for run in runs(plan):
        ends = [times[-1] for times in run.left]
        assert ends == pytest.approx(run.timeline.finished, rel=1e-12)


def test_timeline_bars_are_the_events():
    plan = PLANS["1k on 4"]()
    forward, backward = runs(plan)
    scene = timeline_picture(plan)
    bars = [box for note, box in boxes_of(scene) if "computes" in note]
    events = [e for run in (forward, backward) for e in run.timeline.events if e.kind == "compute"]
    assert [bar.get_x() for bar in bars] == [event.start for event in events]
    pixel = (forward.timeline.seconds + backward.timeline.seconds) / (scene.width - 2 * 20 - 62 - 52 - 28)
    widths = [event.stop - event.start for event in events]
    assert [bar.get_width() for bar in bars] == pytest.approx([max(w - pixel, pixel) for w in widths], abs=1e-9)


def test_mask_pictures_say_how_much_is_allowed(plan):
    share = 100 * plan.mask.area() / plan.layout.seq_len**2
    assert f"{share:.3g}% of all pairs allowed" in words_of(mask_picture(plan.mask, plan.layout))


def test_layout_strips_hold_every_token():
    layout = ls.layouts.zigzag(1000, 4)
    scene = layout_picture(layout)
    spans = [(note, box) for note, box in boxes_of(scene) if note.startswith("rank ")]
    assert len(spans) == len(layout.table)
    for rank in range(4):
        assert sum(box.get_width() for note, box in spans if note.startswith(f"rank {rank}:")) == 250
    for note, box in boxes_of(layout_picture(ls.layouts.striped(1600, 4, stripe=20))):
        start, stop = (int(word.replace(",", "")) for word in note.split(": ")[1].split(" to "))
        assert (box.get_x(), box.get_width()) == (start, stop - start)
    check_drawn(layout_picture(ls.layouts.striped(100_000, 8)))


def test_scaling_points_are_the_plans():
    mask = ls.masks.causal(4096)
    points = scaling_points(mask, (2, 4), schemes=("auto", "ring"), **SIZES)
    for point in points:
        layout = ls.layouts.balanced(mask, world_size=point.ranks)
        reason = next(r for r in ls.plan(mask, layout, scheme=point.scheme, **SIZES).reasons if r.chosen)
        assert (point.seconds, point.bytes_received) == (reason.seconds, reason.bytes_received)
    assert f"ring, 4 ranks: {bytes_text(points[-1].bytes_received)}" in scaling_picture(points).notes


@pytest.mark.parametrize("asked", [(), ("--schemes", "all")], ids=["default", "all"])
def test_the_legend_of_compared_schemes_is_inside_of_the_picture(asked, tmp_path, monkeypatch, capsys):
    drawn = []

    def draw(*points, **words):
        drawn.append(scaling_picture(*points, **words))
        return drawn[0]

    monkeypatch.setattr("longspan.viz.scaling.scaling_picture", draw)
    words = ["compare", "--seq", "64k", "--ranks", "2,4,8", "--plot", str(tmp_path / "curves.svg"), *asked]
    assert main(words) == 0
    check_drawn(drawn[0])
    named = ("PyTorch flex", "PyTorch all_gather", "PyTorch ring", "exchange", "all_to_all", "hybrid", "ring")
    legend = [text for text in texts(drawn[0]) if text.get_text() in (*named, "ideal")]
    assert {text.get_text() for text in legend} == {*named, "ideal"}
    assert len({text.get_position()[1] for text in legend}) == 2  # one row has no room for all


def test_bars_have_the_lengths_of_their_values():
    points = [
        ScalingPoint("exchange, balanced", 4, 0.5, 100, 0),
        ScalingPoint("PyTorch flex, zigzag", 4, 1.0, 400, 0),
        ScalingPoint("ring, zigzag", 8, 0.25, 0, 1 << 20),
    ]
    scene = bars_picture(points)
    check_drawn(scene)
    bars = [box for box in scene.canvas.patches if box.get_gid()]
    widths = [box.get_width() for box in bars]
    assert len(bars) == len(scene.notes) == 9
    assert scene.notes[1].startswith("PyTorch flex, zigzag, 4 ranks, time, both passes: ")
    times_of_4, bytes_of_4 = widths[:2], widths[2:4]
    assert times_of_4[0] == pytest.approx(times_of_4[1] / 2)
    assert bytes_of_4[0] == pytest.approx(bytes_of_4[1] / 4)
    colors = {note.split(",")[0]: box.get_facecolor() for note, box in zip(scene.notes, bars, strict=True)}
    assert colors["exchange"] == colors["ring"] != colors["PyTorch flex"]
    with pytest.raises(PlanError, match="points"):
        bars_picture([])


def test_scaling_of_hardly_anything():
    check_drawn(scaling_picture(scaling_points(ls.masks.causal(256), (1,), schemes=("auto",), **SIZES)))
    with pytest.raises(PlanError, match="points"):
        scaling_picture([])


# -- closed form ----------------------------------------------------------------------------------------------------

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
    dense = mask.allows(at[:, None], at[None, :]).astype(int)
    found = tile_pairs(mask.resized(seq_len).plane().sure, q_edges, kv_edges)
    expected = np.add.reduceat(np.add.reduceat(dense, q_edges[:-1], axis=0), kv_edges[:-1], axis=1)
    assert found.tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 80), st.integers(1, 6), st.integers(1, 20), st.sampled_from(["zigzag", "striped", "contiguous"]))
def test_owners_like_brute_force(seq_len, ranks, tiles, kind):
    layout = getattr(ls.layouts, kind)(seq_len, ranks)
    edges = even_edges(seq_len, tiles)
    whose = layout.owner(np.arange(seq_len))
    for found, start, stop in zip(owners(layout, edges), edges[:-1], edges[1:], strict=True):
        count = np.bincount(whose[start:stop], minlength=ranks)
        assert found == (count.argmax() if 2 * count.max() > stop - start else -1)
    assert (owners(layout, owner_edges(layout, edges)) >= 0).all()  # cut between owners, none shares


def test_work_and_stretches():
    lengths = [5, 1, 30, 12]
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=3)
    problem = Problem.make(mask, layout, Sizes(1, 1, 8, 8, 2))
    assert row_work(mask, layout, 0, 0).tolist() == problem.work.tolist()
    assert np.diff(stretches(mask, 48)).ravel().tolist() == lengths
    assert len(stretches(ls.masks.causal(48), 48)) == 1
    assert not len(stretches(~ls.masks.full(48), 48))


def test_ten_million_tokens_cost_what_their_bands_do():
    lengths = drawn_lengths("short", 10_000_000)
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.per_document([int(lengths[0]), 10_000_000 - int(lengths[0])], 64)
    scene = mask_picture(mask, layout)
    check_drawn(scene)
    assert len(scene.svg()) < 500_000
    assert (
        int(tile_pairs(mask.plane().sure, even_edges(10_000_000, 64), even_edges(10_000_000, 64)).sum()) == mask.area()
    )


@pytest.mark.parametrize("seq_len", [0, 1, 2, 7])
@pytest.mark.parametrize("ranks", [1, 3])
def test_hardly_any_tokens(seq_len, ranks):
    layout = ls.layouts.contiguous(seq_len, ranks)
    check_drawn(mask_picture(ls.masks.causal(seq_len), layout))
    check_drawn(layout_picture(layout, ls.masks.causal(seq_len)))


@pytest.mark.parametrize("scheme", ["auto", "ring", "exchange"])
@pytest.mark.parametrize(
    "mask",
    [
        ~ls.masks.full(16),
        ls.masks.causal(1),
        ls.masks.per_head(*[ls.masks.causal(32), ls.masks.full(32)] * 4),
        ls.masks.per_row(ls.masks.causal(32), ls.masks.documents([20, 12])),
    ],
    ids=["nothing allowed", "one token", "by head", "by row"],
)
def test_unusual_plans(mask, scheme):
    layout = ls.layouts.contiguous(mask.length(), 2)
    plan = ls.plan(mask, layout, scheme=scheme, batch=2, **SIZES)
    for scene in scenes(plan).values():
        check_drawn(scene)


# -- scans ---------------------------------------------------------------------------------------------------------

SCHEMES = ("chain", "exchange", "doubling", "two_level(2)")


def scans(lengths, ranks, scheme="doubling", layout=None):
    mask = ls.masks.documents(lengths) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=ranks) if layout is None else layout
    return ls.scan_plan(mask, layout, heads=2, keys=16, values=16, maps="matrix", scheme=scheme)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_segments_wait_until_the_last_step_of_a_scan(scheme):
    """At first those wait that are not first of their document; at the end none does."""
    plan = scans([300, 420, 180, 124], 4, scheme)
    scene = scan_picture(plan)
    check_drawn(scene)
    notes = [note for note in scene.notes if note.startswith("segment ")]
    chains = [ranks for ranks in plan.chains.ranks() if len(ranks) > 1]
    segments, cuts, columns = sum(map(len, chains)), sum(len(ranks) - 1 for ranks in chains), plan.draft.num_steps
    assert len(notes) == segments * columns
    assert len({note for note in notes if "can be computed" in note}) == segments
    assert len({note for note in notes if "waits" in note}) == cuts
    most = max(plan.bytes_received(rank) for rank in range(4))
    assert f"at most {bytes_text(most)} forward" in scene.svg()


@given(st.lists(st.integers(1, 40), min_size=1, max_size=6), st.integers(1, 9), st.sampled_from(SCHEMES), st.booleans())
@settings(max_examples=30, deadline=None)
def test_any_scan_is_drawn(lengths, ranks, scheme, striped):
    layout = ls.layouts.striped(sum(lengths), ranks, stripe=3) if striped else None
    scene = scan_picture(scans(lengths, ranks, scheme, layout))
    check_drawn(scene)


def test_pieces_of_a_scan_say_where_they_came_from():
    """Four segments one after the other: rank 2 gets what ranks 0 and 1 did from rank 1, and adds its own."""
    plan = scans([400], 4, "chain", ls.layouts.contiguous(400, 4))
    notes = scan_picture(plan).notes
    assert "state[0:3], of which [0:2] from rank 1" in notes
    assert "state[0:3], of which [2:3] from rank 2" in notes
    assert not any(note.startswith("map") for note in notes)
    assert any(note.startswith("map") for note in scan_picture(scans([400], 8)).notes)


def test_tokens_that_are_moved_are_told():
    mask = ls.masks.documents([300, 340]) & ls.masks.causal()
    sizes = {"heads": 2, "keys": 16, "values": 16, "maps": "matrix"}
    plan = ls.scan_plan(mask, ls.layouts.striped(640, 4), **sizes, scheme="relayout", token_bytes=640)
    scene = scan_picture(plan)
    check_drawn(scene)
    assert "moved to it from striped and back" in words_of(scene)


def test_long_scans_are_drawn_in_part_and_say_so():
    plan = scans(drawn_lengths("longtail", 1 << 20).tolist(), 64)
    scene = scan_picture(plan)
    check_drawn(scene)
    assert "Drawn: 1 of " in scene.svg()
    assert len(scene.svg()) < 1_000_000
    assert "The first 9 of 64 steps" in scan_picture(scans([6400], 64, "chain", ls.layouts.contiguous(6400, 64))).svg()


def test_the_command_shows_scans(tmp_path, capsys):
    words = ["show", "scan", "--docs", "700,1200,148", "--ranks", "4"]
    assert main([*words, "--scheme", "doubling"]) == 0
    assert "doubling over <layout balanced" in capsys.readouterr().out
    assert main([*words, "--svg", str(tmp_path / "scan.svg"), "--json"]) == 0
    assert ET.parse(tmp_path / "scan.svg").getroot().tag == f"{SVG}svg"
    assert '"num_chains": 3' in capsys.readouterr().out
    for bad, said in (("--window 5", "--window"), ("--keep", "--keep"), ("--scheme ring", "doubling")):
        assert main([*words, *bad.split()]) != 0
        assert said in capsys.readouterr().err


# -- masks that are functions; notebooks ----------------------------------------------------------------------------


def test_functions_are_asked_in_pictures_of_short_sequences_only():
    every_third = ls.masks.from_mask_mod(lambda b, h, q, kv: (q - kv) % 3 == 0, 60, within=ls.masks.causal())
    scene = mask_picture(every_third)
    at = np.arange(60)
    share = 100 * every_third.allows(at[:, None], at[None, :]).mean()
    assert f"{share:.3g}% of all pairs allowed" in scene.svg()
    assert "a function decides" not in scene.svg()
    assert "a function decides" in mask_picture(every_third, ask=False).svg()

    def never(b, h, q, kv):
        raise AssertionError("asked")

    long = ls.masks.from_mask_mod(never, 1 << 20, within=ls.masks.causal())
    assert "a function decides" in mask_picture(long).svg()
    assert "a function decides" in ls.masks.from_mask_mod(never, 100)._repr_html_()


def test_notebooks_show_pictures():
    plan = PLANS["1k on 4"]()
    scan = scans([300, 420, 180, 124], 4)
    for value in (ls.masks.causal(), plan.mask, plan.layout, plan, scan):
        text = value._repr_html_()
        assert text.count("<svg") == 1
        ET.fromstring(f"<html>{text}</html>")
        assert "<script" not in text
    assert plan.scheme.name in plan._repr_html_()
    assert scan.scheme in scan._repr_html_()
    code = "import sys, longspan; assert not any('viz' in name for name in sys.modules), 'loaded too early'"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_hostile_names_are_escaped():
    plan = PLANS["1k on 4"]()
    mask = ls.masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 64, name=HOSTILE)
    layout = ls.layouts.Layout.from_spans(64, [[(0, 30)], [(30, 64)]], name=HOSTILE)
    drawn = [mask_picture(mask), layout_picture(layout), timeline_picture(plan, title=HOSTILE)]
    drawn += [traffic_picture(plan, title=HOSTILE), memory_picture(plan, title=HOSTILE)]
    for scene in drawn:
        root = check_drawn(scene)
        assert {element.tag for element in root.iter()} <= {
            f"{SVG}{name}" for name in ("svg", "title", "desc", "style", "g", "defs", "path", "use", "clipPath", "text")
        }
        assert "&lt;/script&gt;&lt;img" in scene.svg()
        assert "<img" not in scene.svg() + picture_page(scene, HOSTILE)
    for value in (mask, layout):
        assert "<img" not in value._repr_html_()


def test_too_many_ranks_are_refused():
    plan = made([4000, 96], 200, scheme="ring")
    with pytest.raises(PlanError, match=r"`plan` .*128.*200"):
        timeline_picture(plan)
    check_drawn(mask_picture(plan.mask, plan.layout))
    assert "64 of 200 ranks are drawn" in layout_picture(plan.layout).svg()


# -- colours --------------------------------------------------------------------------------------------------------


def luminance(color):
    values = np.array([int(color[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)
    return float(linear @ [0.2126, 0.7152, 0.0722])


def contrast(a, b):
    low, high = sorted((luminance(a), luminance(b)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_from_both_papers_and_from_each_other():
    for paper in ROLES["paper"]:
        for color in (*SERIES, *(rank_color(i, 21) for i in range(21))):
            assert contrast(color, paper) >= 1.7, (color, paper)
    for side in (0, 1):
        assert contrast(ROLES["ink"][side], ROLES["paper"][side]) >= 10
        assert contrast(ROLES["muted"][side], ROLES["paper"][side]) >= 4.5
    brightness = [luminance(rank_color(i, 21)) for i in range(21)]
    assert brightness == sorted(brightness)  # an order that needs no colours
    # How the two common kinds of colour blindness see linear light (Machado, Oliveira and Fernandes 2009, severity 1).
    blind = (
        [[0.152, 1.053, -0.205], [0.115, 0.786, 0.099], [-0.004, -0.048, 1.052]],
        [[0.367, 0.861, -0.228], [0.280, 0.673, 0.047], [-0.012, 0.043, 0.969]],
    )
    first = [rank_color(rank, 4) for rank in range(4)]
    seen = np.array([[int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)] for c in first]) ** 2.2
    for matrix in blind:
        shown = np.clip(seen @ np.array(matrix).T, 0, 1) ** (1 / 2.2)
        gaps = [np.abs(a - b).max() for n, a in enumerate(shown) for b in shown[:n]]
        assert min(gaps) > 0.12


# -- the command ----------------------------------------------------------------------------------------------------

DOCS = ["--docs", "700,1200,148", "--ranks", "4", "--plain"]


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("mask", ["2,048 tokens", "█", "▒", "Queries go down"]),
        ("layout", ["balanced: 2,048 tokens on 4 ranks", "rank 3", "512 tokens"]),
        ("schedule", ["forward:", "backward:", "step 0", "simulated on h100"]),
        ("traffic", ["from", "to 3", "sent", "MiB in all"]),
        ("memory", ["rank", "forward", "backward", "peak"]),
    ],
)
def test_show_prints_text(capsys, what, said):
    assert main(["show", what, *DOCS]) == 0
    text = capsys.readouterr().out
    assert [word for word in said if word not in text] == []


def test_show_traffic_of_many_ranks(capsys):
    assert main(["show", "traffic", "--seq", "4k", "--ranks", "16", "--plain", "--scheme", "exchange"]) == 0
    assert "peers" in capsys.readouterr().out


@pytest.mark.parametrize("what", ["mask", "layout", "schedule", "traffic", "memory"])
def test_show_writes_files(capsys, tmp_path, what):
    files = {kind: tmp_path / f"picture.{kind}" for kind in ("svg", "html")}
    words = [word for kind, path in files.items() for word in (f"--{kind}", str(path))]
    assert main(["show", what, *DOCS, *words, "--title", HOSTILE.replace("\x00", "")]) == 0
    assert capsys.readouterr().out.count("wrote ") == 2
    ET.fromstring(files["svg"].read_text())
    page = files["html"].read_text()
    assert "Content-Security-Policy" in page
    assert "<img" not in page
    assert "<script" not in page


def test_show_writes_png_and_json(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    import json

    path = tmp_path / "traffic.png"
    assert main(["show", "traffic", *DOCS, "--png", str(path), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["files"] == {"png": str(path)}
    plan = made([700, 1200, 148], 4, machine=None)
    plan = ls.plan(plan.mask, plan.layout, q_heads=32, kv_heads=8, head_dim=128, dtype="bfloat16")
    assert answer["fingerprint"] == plan.fingerprint
    assert np.sum(answer["backward"]["bytes_from_to"], axis=0).tolist() == [
        plan.bytes_received(rank, "backward") for rank in range(4)
    ]
    assert not is_blank(read_png(path))
    for what in ("mask", "layout", "schedule", "memory"):
        assert main(["show", what, *DOCS, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["what"] == what


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["show", "everything"], "invalid choice"),
        (["show"], "required"),
        (["show", "mask"], "--seq"),
        (["show", "mask", *DOCS, "--svg", "/nowhere/at/all.svg"], "/nowhere/at/all.svg"),
        (["show", "schedule", "--seq", "64k", "--ranks", "129", "--scheme", "ring"], "128 ranks or fewer"),
    ],
)
def test_show_refuses(capsys, words, said):
    assert main(words) == 2
    assert said in capsys.readouterr().err


def test_pictures_of_the_documentation_are_there():
    images = Path(__file__).parents[2] / "docs" / "images"
    for name in ("mask", "layout", "timeline", "traffic", "memory", "scaling"):
        ET.fromstring((images / f"{name}.svg").read_text())
        assert not is_blank(read_png(images / f"{name}.png"))
