"""Pictures of layouts: which rank holds which tokens of the sequence."""

from __future__ import annotations

import numpy as np

from longspan.formatting import count_text
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.spans import join
from longspan.viz.mask import equal_runs, even_edges, stretches
from longspan.viz.scene import (
    LANE,
    MARGIN,
    MIXED,
    MUTED,
    PAPER,
    SMALL,
    WIDTH,
    Scene,
    headed,
    picture,
    rank_color,
    shown_ranks,
    token_ticks,
)

_BINS = 620
_LANES = 64
_ABOUT = "One strip per rank, filled where the rank holds tokens of the sequence."


@picture
def layout_picture(layout: Layout, mask: Mask | None = None, *, title: str | None = None) -> Scene:
    """Draw which rank holds which tokens. With a mask, documents (parts that do not see each other) are marked."""
    size, length = layout.world_size, layout.seq_len
    ranks = shown_ranks(size, _LANES)
    documents = [] if mask is None else stretches(mask.resized(length), length).tolist()
    remark = f"{count_text(length)} tokens on {size} ranks in {count_text(len(layout.table))} spans"
    if layout.local_len is not None:
        padding = sum(layout.num_padding(rank) for rank in range(size))
        remark += f", {count_text(layout.local_len)} slots each ({count_text(padding)} of padding)"
    if len(documents) > 1:
        remark += f"; {count_text(len(documents))} documents, which do not see each other"
    remarks = [remark]
    if len(ranks) < size:
        remarks.append(f"{len(ranks)} of {size} ranks are drawn, evenly spread.")
    scene, top = headed(title or f"Layout: {layout.name}", remarks, _ABOUT)

    left, right, end = MARGIN + 72, WIDTH - MARGIN - 98, max(length, 1)
    pixel = end / (right - left)
    top += 10
    if len(documents) > 1:
        scene.text(left - 8, top + 11, "documents", SMALL, MUTED, "right")
        axes = scene.axes(left, top, right - left, 14, xlim=(0, end), has_frame=False)
        scene.box(axes, 0, 0, end, 1, LANE)
        for number, (start, stop) in enumerate(documents):
            if stop - start >= 0.7 * pixel:
                note = f"document {number}: {start:,} to {stop:,}, {stop - start:,} tokens"
                scene.box(axes, start, 0, stop - start, 1, MIXED, 0.85 if number % 2 else 0.5, note)
        top += 26

    lane = 22.0 if len(ranks) <= 8 else 14.0 if len(ranks) <= 16 else 11.0 if len(ranks) <= 32 else 8.5
    labels = range(0, len(ranks), 1 if lane > 10 else 4)
    axes = scene.axes(left, top, right - left, lane * len(ranks), xlim=(0, end), ylim=(len(ranks), 0))
    axes.patch.set_facecolor(PAPER)
    axes.set_xticks(*token_ticks(length))
    axes.set_yticks([order + 0.5 for order in labels], [f"rank {ranks[order]}" for order in labels])
    axes.tick_params(axis="y", length=0, pad=8)
    axes.set_xlabel("position in the sequence (tokens)")
    scene.text(right + 10, top - 8, "tokens", SMALL, MUTED)
    for order in labels:
        tokens = count_text(int(layout.num_tokens[ranks[order]]))
        scene.text(right + 10, top + lane * (order + 0.5) + 4, tokens, SMALL, MUTED)

    gap, edges = 1 / lane, even_edges(length, _BINS)
    for order, rank in enumerate(ranks):
        scene.box(axes, 0, order + gap, end, 1 - 2 * gap, LANE)
        color, spans = rank_color(rank, size), layout.span_table(rank)
        if len(spans) <= 400:
            for start, stop in spans.tolist():
                note = f"rank {rank}: {start:,} to {stop:,}"
                scene.box(axes, start, order + gap, max(stop - start, pixel), 1 - 2 * gap, color, note=note)
        else:  # spans too narrow to be seen: the share of each bin that they fill
            i, j = join(spans, np.stack((edges[:-1], edges[1:]), axis=1))
            held = np.minimum(spans[i, 1], edges[j + 1]) - np.maximum(spans[i, 0], edges[j])
            share = np.bincount(j, weights=held.astype(np.float64), minlength=len(edges) - 1) / np.diff(edges)
            level = np.ceil(share * 4 - 1e-9).astype(np.int64)
            filled = [(start, stop) for start, stop in equal_runs(level) if level[start]]
            boxes = [(edges[a], order + gap, edges[b] - edges[a], 1 - 2 * gap) for a, b in filled]
            scene.boxes(axes, boxes, [(color, 0.2 + 0.2 * int(level[a])) for a, _ in filled])
    if 1 < len(documents) <= 48:
        axes.vlines([start for start, _ in documents[1:]], 0, len(ranks), color=PAPER, linewidth=1.2)
    scene.height = top + lane * len(ranks) + 52
    return scene
