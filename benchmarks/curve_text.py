"""Generate text for training curves: short stories as bytes, packed into rows. A seed always gives the same text.

Every story repeats its own hero, town and numbers: to predict them, a token must look back in its own document, and
looking into another one misleads.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
from torch import Tensor

VOCAB = 128
"""Bytes of plain ASCII."""
_HEROES = ("Mira", "Jonas", "Tarek", "Olga", "Pim", "Zelda", "Bruno", "Ida")
_TOWNS = ("Lund", "Porto", "Quito", "Turku", "Delft", "Kyoto")
_THINGS = ("lamps", "boats", "books", "stones", "keys", "clocks")
_VERBS = ("finds", "sells", "paints", "counts", "hides", "mends")


@dataclass(frozen=True)
class Row:
    """A packed row: its tokens, and the lengths of its documents."""

    ids: Tensor
    lengths: list[int]


def story(draw: random.Random) -> bytes:
    """A document of one to about thirty sentences, most of them short."""
    hero, town, thing = draw.choice(_HEROES), draw.choice(_TOWNS), draw.choice(_THINGS)
    number = draw.randrange(10, 100)
    sentences = [f"{hero} of {town} has {number} {thing}."]
    for _ in range(int(draw.paretovariate(1.1)) % 30):
        verb, more = draw.choice(_VERBS), draw.randrange(2, 10)
        sentences.append(
            draw.choice(
                (
                    f"In {town} {hero} {verb} {more} {thing}.",
                    f"{hero} {verb} {number} {thing} in {town}.",
                    f"{number} and {more} make {number + more}.",
                )
            )
        )
    return " ".join(sentences).encode() + b"\n"


def packed_row(seed: int, seq_len: int) -> Row:
    """Return stories until the row is full; the last one is truncated, as packing does."""
    draw = random.Random(seed)
    lengths: list[int] = []
    text = b""
    while len(text) < seq_len:
        part = story(draw)[: seq_len - len(text)]
        lengths.append(len(part))
        text += part
    return Row(torch.tensor(list(text)), lengths)
