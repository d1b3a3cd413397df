"""Document lengths: drawn by kind, or read from a file, which is bounded and strictly parsed."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from longspan.errors import MaskError
from longspan.span import Ints

KINDS = ("longtail", "short", "mixed")
MAX_FILE = 1 << 20
MAX_TOKENS = 1 << 40


def drawn_lengths(kind: str, seq_len: int, seed: int = 0) -> Ints:
    """Lengths that add up to `seq_len`: of short documents, of a wide mix, or of many short and few long ones.

    >>> int(drawn_lengths("longtail", 1000).sum())
    1000
    """
    if seed < 0:
        raise MaskError(f"--seed {seed} was asked for. Documents are drawn from a seed of 0 or more.")
    chance = np.random.default_rng(seed)
    left = seq_len
    lengths: list[int] = []
    while left:
        lengths.append(int(min(max(_draw(kind, chance), 16), left)))
        left -= lengths[-1]
    return np.array(lengths, dtype=np.int64)


def _draw(kind: str, chance: np.random.Generator) -> float:
    if kind == "short":
        return chance.lognormal(7.0, 1.0)
    if kind == "mixed":
        return chance.lognormal(7.5, 1.8)
    if kind != "longtail":
        raise MaskError(f"documents of kind {kind!r} were asked for. Choose one of {', '.join(KINDS)}.")
    which = chance.random()
    center, spread = (6.8, 1.0) if which < 0.80 else (9.0, 0.8) if which < 0.97 else (11.5, 0.6)
    return chance.lognormal(center, spread)


def read_lengths(path: Path) -> Ints:
    """The lengths in a file: one whole number a line, or a JSON list of them."""
    with path.open("rb") as file:
        data = file.read(MAX_FILE + 1)
    if len(data) > MAX_FILE:
        raise MaskError(f"{path} has more than {MAX_FILE} bytes. A list of document lengths has at most that.")
    try:
        text = data.decode()
    except UnicodeDecodeError as wrong:
        raise MaskError(f"{path} is not text. Give one length a line, or a JSON list of lengths.") from wrong
    return _from_json(text, path) if text.lstrip().startswith("[") else _from_lines(text, path)


def _from_json(text: str, path: Path) -> Ints:
    try:
        lengths = json.loads(text)
    except (ValueError, RecursionError) as wrong:
        raise MaskError(f"{path} begins like a JSON list, but is not one: {wrong!s:.80}.") from wrong
    for number, length in enumerate(lengths):
        if type(length) is not int or not 0 < length <= MAX_TOKENS:
            raise MaskError(f"{path}: entry {number} is {length!r:.40}. A length is a whole number, 1 or more.")
    return _as_array(lengths, str(path))


def _from_lines(text: str, path: Path) -> Ints:
    lengths: list[int] = []
    for number, line in enumerate(text.splitlines(), start=1):
        word = line.strip()
        if not word:
            continue
        if not (word.isascii() and word.isdecimal()) or len(word) > 13 or not 0 < int(word) <= MAX_TOKENS:
            raise MaskError(f"{path}, line {number}: {word!r:.40} was found. A length is a whole number, 1 or more.")
        lengths.append(int(word))
    return _as_array(lengths, str(path))


def _as_array(lengths: list[int], where: str) -> Ints:
    if not lengths or sum(lengths) > MAX_TOKENS:
        raise MaskError(f"{where} lists {len(lengths)} lengths. They must add up to 1 to {MAX_TOKENS} tokens.")
    return np.array(lengths, dtype=np.int64)
