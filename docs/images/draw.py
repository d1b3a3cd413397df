"""Draw every picture of the documentation.

python docs/images/draw.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import longspan as ls
from longspan.viz import (
    layout_picture,
    mask_picture,
    memory_picture,
    timeline_picture,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HERE = Path(__file__).parent
SIZES = {
    "q_heads": 32,
    "kv_heads": 8,
    "head_dim": 128,
    "dtype": "bfloat16",
    "machine": "h100",
}
LENGTHS = [9000, 14000, 3000, 6768]
STORIES = [230, 40, 150, 92]  # from the tutorial


def tutorial() -> dict[str, Figure]:
    """Return the pictures of the tutorial: 512 tokens on two ranks, packed stories on eight, then 512 times as many."""
    causal, two = ls.masks.causal(512), ls.layouts.zigzag(512, 2)
    packed = ls.masks.documents(STORIES) & ls.masks.causal()
    eight = ls.layouts.balanced(packed, world_size=8)
    long = ls.masks.documents([512 * n for n in STORIES]) & ls.masks.causal()
    wide = ls.plan(
        long, ls.layouts.balanced(long, world_size=8), **SIZES, scheme="exchange"
    )
    return {
        "tutorial-two": mask_picture(causal, two),
        "tutorial-mask": mask_picture(packed, eight),
        "tutorial-layout": layout_picture(eight, packed),
        "tutorial-timeline": timeline_picture(wide),
    }


def pictures() -> dict[str, Figure]:
    """Return every other picture: a small batch on four ranks."""
    mask = ls.masks.documents(LENGTHS) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=4)
    plan = ls.plan(mask, layout, **SIZES, scheme="exchange")
    return {
        "mask": mask_picture(mask, layout),
        "layout": layout_picture(layout, mask),
        "timeline": timeline_picture(plan),
        "memory": memory_picture(plan),
    }


def readme(path: Path) -> None:
    """Draw README's picture: who computes which part of the attention of four packed documents."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    mask = ls.masks.documents(LENGTHS) & ls.masks.causal()
    layout = ls.layouts.balanced(mask, world_size=4)
    ends = np.cumsum(LENGTHS)
    total = ends[-1]
    figure = Figure(figsize=(3.2, 3.1), dpi=200)  # shown with 320 pixels
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-0.035 * total, total), ylim=(total, 0), aspect="equal")
    axes.axis("off")
    axes.fill((0, total, total, 0), (0, 0, total, total), "#eff1f3")  # masked
    for rank, color in enumerate(("#0072b2", "#d55e00", "#009e73", "#cc79a7")):
        pairs = 0.0
        for span in layout.spans(rank):
            a, b = span.start, span.stop  # its tokens, in the strip at the left
            left, right = -0.03 * total, -0.01 * total
            axes.fill((left, right, right, left), (a, a, b, b), color)
            for start, stop in zip(ends - LENGTHS, ends, strict=True):
                a, b = max(span.start, start), min(span.stop, stop)
                if a < b:  # the keys of a query: from the start of its document on
                    axes.fill((start, a, b, start), (a, a, b, b), color)
                    pairs += (b - a) * ((a + b) / 2 - start)
        share = pairs / sum(n * n / 2 for n in LENGTHS)
        axes.fill((), (), color, label=f"rank {rank}: {share:.0%} of the work")
    title = "Attention of 4 packed\ndocuments on 4 ranks"
    legend = axes.legend(
        loc="upper right", frameon=False, fontsize=8, title=title, handlelength=1
    )
    legend.set_alignment("left")
    legend.get_title().set(fontsize=8.5, fontweight="bold")
    words = "rows: queries\ncolumns: keys\ngrey: masked"
    axes.text(0.03 * total, 0.97 * total, words, fontsize=8, va="bottom")
    figure.savefig(path)


if __name__ == "__main__":
    readme(HERE / "readme.png")
    for name, figure in (pictures() | tutorial()).items():
        figure.savefig(HERE / f"{name}.png", dpi=150)
        print(name)
