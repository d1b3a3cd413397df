"""Options of `longspan.attention` as score functions: soft cap, ALiBi, relative bias, bias tensor.

Each takes (score, b, h, q_idx, kv_idx) with indices of four dims that broadcast, in global positions. Sinks are checked
here and applied in `run/passes.py`; dropout is in `pipeline.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.errors import KernelError
from longspan.planning.plan import Plan
from longspan.scoring.pipeline import ScoreMod, Scoring, dropout_of, score_function
from longspan.scoring.recorded import Recorded, record
from longspan.spans import check_int
from longspan.tile import accumulation_dtype
from longspan.validate import check_plain, is_number


def soft_cap(cap: float) -> ScoreMod:
    """Return the function cap * tanh(score / cap)."""
    if isinstance(cap, Tensor) or not is_number(cap) or not 0 < cap < 1e30:  # float32 ends at 3e38
        raise KernelError(
            f"softcap must be a number above 0 and below 1e30, but got softcap = {cap!r}. Leave it out for none."
        )
    cap = float(cap)

    def softcap(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        return torch.tanh(score / cap) * cap

    return softcap


def alibi_slopes(num_heads: int) -> Tensor:
    """Return the slopes of the ALiBi paper: powers of 2 ** (-8 / heads), interleaved if heads is no power of two.

    >>> alibi_slopes(4).tolist()
    [0.25, 0.0625, 0.015625, 0.00390625]
    """
    num_heads = check_int(num_heads, "num_heads", "alibi_slopes()", KernelError, low=1, high=1 << 16)
    base = 1 << (num_heads.bit_length() - 1)
    slopes = [2 ** (-8 * (i + 1) / base) for i in range(base)]
    slopes += [2 ** (-4 * (2 * i + 1) / base) for i in range(num_heads - base)]
    return torch.tensor(slopes)


def alibi(slopes: Tensor, heads: int) -> ScoreMod:
    """Return the function score - slopes[head] * distance."""
    _check_shape("alibi", slopes, {"heads": heads})

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        return score - slopes[h].to(score.dtype) * (q - kv).abs()

    return biased


@dataclass(frozen=True, eq=False)
class RelativeBias:
    """A learned bias by distance, as in T5: near distances have a bucket each, far ones share, the farthest the last.

    `table` is (buckets, heads). `bidirectional` gives half of the buckets to keys after the query; without it such
    keys count as distance 0, as T5's decoder has it.
    """

    table: Tensor
    bidirectional: bool = True
    max_distance: int = 128

    def __post_init__(self) -> None:
        if not isinstance(self.table, Tensor) or self.table.ndim != 2:
            kind = tuple(self.table.shape) if isinstance(self.table, Tensor) else type(self.table).__name__
            raise KernelError(f"RelativeBias takes a table (buckets, heads), but got {kind}.")
        check_int(self.max_distance, "max_distance", "RelativeBias()", KernelError, low=1)
        buckets = self.table.shape[0] // 2 if self.bidirectional else self.table.shape[0]
        if buckets < 2 or self.max_distance <= buckets // 2:
            raise KernelError(
                f"RelativeBias has a table of shape {tuple(self.table.shape)}, bidirectional={self.bidirectional} and"
                f" max_distance={self.max_distance}. Each direction needs 2 buckets or more, and max_distance more than"
                f" half of its buckets, which near distances have to themselves."
            )

    def bucket(self, q: Tensor, kv: Tensor) -> Tensor:
        """Return the bucket of each pair.

        >>> position = torch.arange(4)
        >>> RelativeBias(torch.zeros(8, 1), max_distance=16).bucket(position[:, None], position).tolist()
        [[0, 5, 6, 6], [1, 0, 5, 6], [2, 1, 0, 5], [2, 2, 1, 0]]
        """
        buckets, distance = self.table.shape[0], q - kv
        after = torch.zeros_like(distance)
        if self.bidirectional:
            buckets //= 2
            after = (distance < 0) * buckets
            distance = distance.abs()
        distance = distance.clamp(min=0)
        exact = buckets // 2
        share = torch.log(distance.clamp(min=1).float() / exact) / math.log(self.max_distance / exact)
        far = exact + (share * (buckets - exact)).to(torch.int64)
        return after + torch.where(distance < exact, distance, far.clamp(max=buckets - 1))


def relative_bias(bias: RelativeBias, heads: int) -> ScoreMod:
    """Return the function score + the table's entry for the distance and the head."""
    if not isinstance(bias, RelativeBias):
        raise KernelError(
            f"relative_bias takes longspan.scores.RelativeBias(table, bidirectional=, max_distance=), which maps"
            f" distances to buckets, but got {type(bias).__name__}."
        )
    _check_shape("RelativeBias.table", bias.table, {"buckets": None, "heads": heads})

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:  # noqa: ARG001
        return score + bias.table[bias.bucket(q, kv), h]

    return biased


def check_bias(bias: Tensor, batch: int, heads: int, seq_len: int | None) -> None:
    """Raise unless the bias broadcasts to all pairs; without a length, its last two dims are not checked."""
    wanted = (batch, heads, seq_len, seq_len)
    if not isinstance(bias, Tensor) or not bias.is_floating_point():
        kind = bias.dtype if isinstance(bias, Tensor) else type(bias).__name__
        raise KernelError(
            f"bias must be a floating-point tensor (batch, heads, queries, keys) that is added to scores, but got"
            f" {kind}. To hide pairs use a mask."
        )
    shape = tuple(bias.shape)
    if len(shape) != 4 or any(b is not None and a not in (1, b) for a, b in zip(shape, wanted, strict=True)):
        raise KernelError(
            f"bias has shape {shape}, but it is indexed by global (batch, head, query, key) = {wanted}; dims of 1 serve"
            f" all. Pass the whole bias on every rank."
        )


def additive_bias(bias: Tensor) -> ScoreMod:
    """Return the function score + bias[b, h, q, kv]; dims of 1 serve all."""
    shape = tuple(bias.shape)

    def biased(score: Tensor, b: Tensor, h: Tensor, q: Tensor, kv: Tensor) -> Tensor:
        index = [torch.zeros_like(i) if size == 1 else i for i, size in zip((b, h, q, kv), shape, strict=True)]
        return score + bias[tuple(index)]

    return biased


@dataclass(frozen=True, eq=False)
class Extras:
    """Options of a call beyond the mask, checked when they are combined."""

    score_mod: ScoreMod | None = None
    softcap: float | None = None
    alibi: Tensor | None = None
    relative_bias: RelativeBias | None = None
    bias: Tensor | None = None
    dropout: float = 0.0
    seed: int | None = None

    def any(self) -> bool:
        """Return whether any option is set."""
        options = (self.score_mod, self.softcap, self.alibi, self.relative_bias, self.bias, self.seed)
        return self.dropout != 0.0 or any(value is not None for value in options)

    def scoring(self, like: Tensor, plan: Plan) -> Scoring | None:
        """Check the options and build the scoring for a plan's calls."""
        functions = self._functions(like, plan.sizes.batch, plan.sizes.q_heads, plan.layout.seq_len)
        if self.score_mod is not None:
            functions.append(score_function(self.score_mod))
        seed = self._check_seed()
        dropout = None if seed is None else dropout_of(self.dropout, seed)
        # Functions are tried on the first pair, which an empty sequence does not have.
        is_mapped = self.score_mod is not None
        return None if plan.layout.seq_len == 0 else Scoring.of(functions, dropout, like, is_mapped=is_mapped)

    def record(self, q: Tensor, k: Tensor) -> Recorded:
        """Record the options as text, for compiled code. The operator checks what depends on the plan."""
        functions = self._functions(q, q.shape[0], q.shape[1], None)
        if self.score_mod is not None:
            functions.append(self.score_mod)
        recorded = record(functions, (q if q.requires_grad else k).sum().to(accumulation_dtype(q.dtype)))
        if self.bias is not None and recorded.why == "":
            recorded.text = f"bias({recorded.name_of(self.bias)})\n{recorded.text}"
        seed = self._check_seed()
        if seed is not None:
            recorded.numbers.append(seed)
            recorded.reals.append(float(self.dropout))
            recorded.text = f"dropout(f{len(recorded.reals) - 1}, i{len(recorded.numbers) - 1})\n{recorded.text}"
        return recorded

    def _functions(self, like: Tensor, batch: int, heads: int, seq_len: int | None) -> list[ScoreMod]:
        """Return the named options as functions, in the order of `pipeline`."""
        functions: list[ScoreMod] = []
        if self.softcap is not None:
            functions.append(soft_cap(self.softcap))
        table = getattr(self.relative_bias, "table", None)
        for name, tensor in (("alibi", self.alibi), ("bias", self.bias), ("RelativeBias.table", table)):
            check_plain(name, tensor)
            if isinstance(tensor, Tensor) and tensor.device != like.device:
                raise KernelError(f"{name} is on {tensor.device}, but q is on {like.device}. Move it there.")
        if self.alibi is not None:
            functions.append(alibi(self.alibi, heads))
        if self.relative_bias is not None:
            functions.append(relative_bias(self.relative_bias, heads))
        if self.bias is not None:
            check_bias(self.bias, batch, heads, seq_len)
            functions.append(additive_bias(self.bias))
        return functions

    def _check_seed(self) -> int | None:
        if self.dropout != 0.0 and self.seed is None:
            raise KernelError(
                f"dropout = {self.dropout} needs a seed. Dropped pairs are a function of the seed and of global"
                f" positions: pass seed=, the same on every rank and another one in every step and layer."
            )
        return self.seed


def check_sinks(sinks: Tensor, heads: int) -> None:
    """Raise unless sinks are one number per head."""
    check_plain("sinks", sinks)
    _check_shape("sinks", sinks, {"heads": heads})


def _check_shape(name: str, tensor: Tensor, dims: dict[str, int | None]) -> None:
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        kind = f"a tensor of {tensor.dtype}" if isinstance(tensor, Tensor) else type(tensor).__name__
        raise KernelError(
            f"{name} must be a floating-point tensor ({', '.join(dims)}), but got {kind}. Convert it first."
        )
    wanted = tuple(dims.values())
    if tensor.ndim != len(wanted) or any(b not in (None, a) for a, b in zip(tensor.shape, wanted, strict=True)):
        text = ", ".join(f"{dim}" if size is None else f"{dim} = {size}" for dim, size in dims.items())
        raise KernelError(
            f"{name} has shape {tuple(tensor.shape)}, but ({text}) is needed: every rank passes all query heads."
        )
