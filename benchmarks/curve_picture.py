"""Draw training curves: losses above, differences from one process below. Needs matplotlib."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from benchmarks.curves import Family

BAR = 1e-4
INK, GREY = "#1b1f24", "#8a939d"
ONE, RANKS, FOUR = "#9cc3e6", "#0b3d91", "#2a9d8f"
WRONG = ("#d1495b", "#edae49")
TITLES = {
    "llama": "Llama style: RMS norm, rotary, shared KV heads, SwiGLU",
    "gemma": "Gemma style: windows and full layers, soft caps",
}


def draw(families: list[Family], path: str) -> None:
    """Write the PNG."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6.6), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    grid: Any = figure.subplots(2, len(families), sharex=True, sharey="row", height_ratios=(3, 2), squeeze=False)
    for column, family in enumerate(families):
        _losses(grid[0, column], family)
        _differences(grid[1, column], family)
    grid[0, 0].set_ylabel("loss (nats per byte)")
    grid[1, 0].set_ylabel("difference from one process")
    steps = len(families[0].curves[0].losses)
    figure.suptitle(
        f"{steps} steps on packed text: four Gloo ranks (FSDP2, split sequences) and one process, float32",
        color=INK,
        fontsize=12.5,
    )
    figure.savefig(path)


def _losses(axes: Any, family: Family) -> None:
    one, ranks = family.curves[:2]
    axes.plot(one.losses, color=ONE, linewidth=5.5, solid_capstyle="round", label=one.label)
    axes.plot(ranks.losses, color=RANKS, linewidth=1.3, label=f"four ranks: {ranks.label}")
    axes.set_title(TITLES[family.name], color=INK, fontsize=11)
    axes.legend(frameon=False, loc="upper right", labelcolor=INK)
    axes.set_ylim(bottom=0)
    _plain(axes)


def _differences(axes: Any, family: Family) -> None:
    right, wrong = iter((RANKS, FOUR)), iter(WRONG)
    floor = 1e-8  # a difference of 0 has no logarithm
    for curve in family.curves[1:]:
        values = [max(value, floor) for value in family.difference(curve)]
        if curve.mistake:
            axes.plot(values, color=next(wrong), linewidth=1.7, label=f"mistake: {curve.label}")
        else:
            axes.plot(values, ".", color=next(right), markersize=4, label=curve.label)
    axes.axhline(BAR, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    steps = len(family.curves[0].losses)
    axes.annotate("allowed", (steps, BAR), color=GREY, ha="right", va="bottom", fontsize=9)
    axes.set_yscale("log")
    axes.set_ylim(floor / 3, 100)
    axes.set_yticks([floor, 1e-6, 1e-4, 1e-2, 1], ["equal", "1e-6", "1e-4", "1e-2", "1"])
    axes.minorticks_off()
    axes.set_xlabel("step")
    axes.legend(frameon=False, loc="upper right", fontsize=8.5, labelcolor=INK, ncols=2)
    _plain(axes)


def _plain(axes: Any) -> None:
    axes.grid(color="#e4e7eb", linewidth=0.7)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(GREY)
    axes.tick_params(colors=INK, labelsize=9)
