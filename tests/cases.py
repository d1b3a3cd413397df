"""Random masks, layouts and sizes for the planning tests: one table, drawn from a seed."""

from dataclasses import dataclass

import numpy as np

from longspan import layouts, masks
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning import Problem, Sizes

LAYOUTS = ("contiguous", "zigzag", "striped", "per_document", "round_robin_by_work", "balanced", "scattered", "equal")
MASKS = (
    "causal",
    "full",
    "documents",
    "window",
    "prefix",
    "chunked",
    "sinks",
    "opaque",
    "per_head",
    "per_row",
    "empty",
)


@dataclass(frozen=True)
class Case:
    mask: Mask
    layout: Layout
    sizes: Sizes
    scheme: str
    node: int | None
    max_rows: int | None

    def problem(self) -> Problem:
        return Problem.make(self.mask, self.layout, self.sizes, node=self.node, max_rows=self.max_rows)

    def __str__(self) -> str:
        return f"{self.scheme} of {self.mask} over {self.layout}, node {self.node}, {self.sizes}"


def random_lengths(rng, total):
    cuts = np.sort(rng.integers(0, total + 1, size=rng.integers(0, 8)))
    return np.diff(np.concatenate(([0], cuts, [total])))


def random_mask(rng, kind, total, sizes):
    documents = masks.documents(random_lengths(rng, total))
    window = masks.sliding_window(int(rng.integers(0, total + 1)), int(rng.integers(0, 3)))
    lengths = random_lengths(rng, total)
    make = {
        "causal": lambda: masks.causal(total),
        "full": lambda: masks.full(total),
        "documents": lambda: documents & masks.causal(),
        "window": lambda: documents & window,
        "prefix": lambda: masks.prefix_lm(lengths // 3, lengths),
        "chunked": lambda: masks.chunked(int(rng.integers(1, total + 1)), total) & masks.causal(),
        "sinks": lambda: (window | masks.global_prefix(int(rng.integers(0, 4)))) & masks.causal(total),
        "opaque": lambda: masks.from_mask_mod(lambda b, h, q, k: (q + 3 * k) % 7 < 4, within=documents) | window,
        "per_head": lambda: masks.per_head(*_choices(rng, [documents & masks.causal(), window], sizes.q_heads)),
        "per_row": lambda: masks.per_row(*_choices(rng, [documents, masks.causal(total)], sizes.batch)),
        "empty": lambda: masks.causal(total) & ~masks.causal(total),
    }
    return make[kind]().resized(total)


def _choices(rng, options, count):
    return [options[i] for i in rng.integers(0, len(options), size=count)]


def random_layout(rng, kind, mask, total, world):
    if kind == "scattered":  # any cut, any owner, ranks may stay empty
        edges = np.unique(np.concatenate(([0, total], rng.integers(0, total + 1, size=rng.integers(0, 3 * world)))))
        owner = rng.integers(0, world, size=len(edges) - 1)
        rows = np.stack((edges[:-1], edges[1:], owner), axis=1)
        return Layout.from_table(total, world, rows[rng.permutation(len(rows))], "scattered")
    make = {
        "contiguous": lambda: layouts.contiguous(total, world),
        "zigzag": lambda: layouts.zigzag(total, world),
        "striped": lambda: layouts.striped(total, world, stripe=int(rng.integers(1, 9))),
        "per_document": lambda: layouts.per_document(random_lengths(rng, total), world),
        "round_robin_by_work": lambda: layouts.round_robin_by_work(mask, world, block=int(rng.integers(1, 33))),
        "balanced": lambda: layouts.balanced(mask, world_size=world),
        "equal": lambda: layouts.zigzag(total, world, equal_tokens=True),
    }
    return make[kind]()


def random_case(seed: int) -> Case:
    """The case of a seed; every kind of mask, layout and scheme comes up."""
    rng = np.random.default_rng(seed)
    world = int(
        rng.choice([1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64], p=[2 / 24, *[3 / 24] * 4, *[2 / 24] * 4, *[2 / 72] * 3])
    )
    total = int(rng.integers(1, 40 if rng.random() < 0.2 else 600))
    kv_heads = int(rng.choice([1, 2, 3, 4]))
    head_dim = int(rng.choice([8, 64, 128]))
    sizes = Sizes(
        kv_heads * int(rng.choice([1, 2, 4])),
        kv_heads,
        head_dim,
        int(rng.choice([head_dim, 32])),
        2,
        int(rng.integers(1, 4)),
    )
    mask = random_mask(rng, MASKS[seed % len(MASKS)], total, sizes)
    layout = random_layout(rng, LAYOUTS[seed // len(MASKS) % len(LAYOUTS)], mask, total, world)
    heads = int(rng.choice([d for d in range(1, world + 1) if world % d == 0]))
    scheme = str(
        rng.choice(
            [
                "ring",
                "all_gather",
                "exchange",
                "all_to_all",
                f"hybrid({heads})",
                f"hybrid({heads},exchange)",
                f"hybrid({heads},all_gather)",
            ]
        )
    )
    node = int(rng.choice([d for d in range(1, world + 1) if world % d == 0])) if rng.random() < 0.5 else None
    return Case(mask, layout, sizes, scheme, node, int(rng.integers(20, 200)) if rng.random() < 0.2 else None)
