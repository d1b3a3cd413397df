"""Draw every picture of the documentation.

python docs/images/draw.py
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

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


if __name__ == "__main__":
    for name, figure in (pictures() | tutorial()).items():
        figure.savefig(HERE / f"{name}.png", dpi=150)
        print(name)
