"""Compare a user's own call or model over ranks with one device, and name the likely cause of a difference.

Importing this package needs only numpy; torch is loaded when something is verified.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.verification.report import Check, Finding, Report, VerifyError

if TYPE_CHECKING:  # torch is loaded when something is verified
    import torch
    from torch import Tensor

    from longspan.masks.document_rows import Documents
    from longspan.scoring.biases import RelativeBias
    from longspan.scoring.pipeline import ScoreMod
    from longspan.validate import Group

__all__ = [
    "Check",
    "Finding",
    "Report",
    "VerifyError",
    "loopback_attention",
    "prove_model",
    "verify",
    "verify_documents",
    "verify_model",
]


def verify(
    fn: Callable[[Tensor, Tensor, Tensor], Tensor | tuple[Tensor, Tensor]],
    inputs: tuple[Tensor, Tensor, Tensor] | None,
    plan: Plan,
    *,
    group: Group = None,
    scale: float | None = None,
    score_mod: ScoreMod | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    relative_bias: RelativeBias | None = None,
    bias: Tensor | None = None,
    dropout: float = 0.0,
    seed: int | None = None,
    captured_grads: str = "sum",
    probes: int = 3,
    factor: float = 1.0,
    draw: int = 0,
    device: torch.device | str | None = None,
) -> Report:
    """Compare an attention call over the ranks of a plan with one device, forward and backward.

    The reference is dense attention in float64 under the plan's mask, over whole inputs that every rank makes itself.
    Gradients of q, k, v, sinks and all captured tensors are compared for a random gradient of the output; then tokens
    that the mask hides are changed, and nothing that cannot see them may move. Budgets are the effect of rounding on
    the reference. Without a group one process runs all ranks: `fn` gets whole tensors and returns the whole output.

    Args:
        fn: your call, `fn(q, k, v)`: local shards in, local output out (or output and lse).
        inputs: `(q, k, v)` of whole sequences, equal on all ranks, or None for random ones.
        plan: mask, layout and sizes of the call.
        group: the ranks that run it.
        scale, score_mod, softcap, sinks, alibi, relative_bias, bias, dropout, seed, captured_grads: options of
            the call, as in `longspan.attention`.
        probes: number of hidden tokens to change.
        factor: multiplies the budgets.
        draw: seed of the random inputs.
        device: device of random inputs.

    Returns:
        A `Report` with `ok`, `findings` with their likely causes, and all comparisons.

    >>> import torch
    >>> from longspan import layouts, masks, plan
    >>> mask = masks.documents([20, 12]) & masks.causal()
    >>> ring = plan(mask, layouts.zigzag(32, 2), q_heads=2, kv_heads=1, head_dim=8, dtype="float32", scheme="ring")
    >>> verify(lambda q, k, v: loopback_attention(q, k, v, ring), None, ring).ok
    True
    >>> causal = lambda q, k, v: torch.nn.functional.scaled_dot_product_attention(
    ...     q, k, v, is_causal=True, enable_gqa=True)
    >>> verify(causal, None, ring).causes
    ('mask replaced by plain causal',)
    """
    from longspan.verification.compare import CallSpec, verify_attention

    spec = CallSpec(scale, score_mod, softcap, sinks, alibi, relative_bias, bias, dropout, seed, captured_grads)
    return verify_attention(fn, inputs, plan, group, spec, probes=probes, factor=factor, draw=draw, device=device)


def verify_model(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    local: Callable[..., Any],
    whole: Callable[..., Any],
    layout: Layout,
    group: Group = None,
    mask: Mask | None = None,
    gradients: str = "sum",
    loss: str = "same",
    reference: torch.nn.Module | None = None,
    causes: Mapping[str, Callable[..., Any]] | None = None,
    probes: int = 2,
    factor: float = 1.0,
) -> Report:
    """Compare a training step over the ranks with one device: loss, logits and gradients of every parameter.

    - `local(model, batch)` is your step on this rank, up to the loss: it gets the whole batch and shards it itself. It
      returns the loss, or `(loss, logits)` with logits (batch, local tokens, vocabulary), as `whole` does.
    - `whole(model, batch, mask)` is the same on one device; `mask` is the argument of that name.
    - `gradients`: how you reduce gradients after backward, which verify then does for you: they are added up over the
      group ("sum"), averaged as DDP does ("average"), or reduced already, as by FSDP ("done").
    - `loss`: every rank reports the "same" loss of the whole batch, or its "share", and the shares add up.
    - `reference`: the model for the one-device run, where `model` itself is sharded; the same names and weights.
    - `causes`: more mistakes to recognise, by name, each a function like `whole`.

    The reference is the one-device run in float64, of a copy of the model; where that fails, in the model's own
    precision. Gradients of the model are restored afterwards.
    """
    from longspan.verification.model import verify_step
    from longspan.verification.model_step import ModelStep

    step = ModelStep(model, dict(batch), local, whole, layout, mask, gradients, loss, reference, dict(causes or {}))
    return verify_step(step, group, probes, factor)


def prove_model(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    local: Callable[..., Any],
    whole: Callable[..., Any],
    ranks: int = 2,
    layouts: Sequence[str | Layout] = ("zigzag", "contiguous", "striped"),
    mask: Mask | None = None,
    gradients: str = "sum",
    loss: str = "same",
    factor: float = 1.0,
) -> Report:
    """Compare a training step over simulated ranks with one device: loss, logits and gradients, in this process.

    There is no group and no launcher, and a small model takes a second or two, so it can run before every training job
    and in any test. Every rank has a copy of the model with the same parameters, in float64 where that
    runs, else in the model's own precision. The model itself never runs and is not changed.

    - `local(model, batch, layout, group)` is your step on one rank, up to the loss: it gets the whole batch and shards
      it itself, with the layout and `group.rank()`. The group goes where Longspan takes a process group; calls of
      `torch.distributed` are refused. It returns the loss, or `(loss, logits)`, as `whole` does.
    - `whole(model, batch)` is the same on one device; `whole(model, batch, mask)` if `mask` is passed.
    - `ranks` and `layouts`: layouts to compare, by name (zigzag, contiguous, striped) or as layouts of your own.
    - `mask`: with it more mistakes can be recognised, of masks and of labels across documents.
    - `gradients` and `loss`: as in `verify_model`; gradients are "sum" or "average".
    - `factor` multiplies budgets, which are the effect of float32 rounding on the model.

    The report names the first module whose output differs, and the likely cause where it is a known one. Use a few
    layers and a hundred tokens, also of a model for long sequences.

    >>> import torch
    >>> from longspan import layouts
    >>> from longspan.training import token_loss
    >>> class Mean(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x - x.mean(1, keepdim=True)  # over the tokens of this rank
    >>> def local(model, batch, layout, group):
    ...     ids, labels = (layout.shard(batch[name], group.rank(), 1) for name in ("input_ids", "shift_labels"))
    ...     return token_loss(model(ids), labels, group=group, gradients="sum")
    >>> def whole(model, batch):
    ...     return token_loss(model(batch["input_ids"]), batch["shift_labels"], group=None, gradients="sum")
    >>> ids = torch.arange(12)[None] % 7
    >>> batch = {"input_ids": ids, "shift_labels": ids.roll(-1, 1)}
    >>> model = torch.nn.Sequential(torch.nn.Embedding(7, 4), Mean(), torch.nn.Linear(4, 7))
    >>> prove_model(model, batch, local=local, whole=whole).findings[0].what
    'differs, first in 1 (Mean)'
    >>> model[1] = torch.nn.SiLU()
    >>> prove_model(model, batch, local=local, whole=whole).ok
    True
    """
    from longspan.verification.model import prove_step, resolve_layouts
    from longspan.verification.model_step import ModelStep

    wanted = resolve_layouts(layouts, batch, ranks)
    one_device = whole if mask is not None else lambda model, batch, _: whole(model, batch)
    step = ModelStep(model, dict(batch), local, one_device, wanted[0], mask, gradients, loss, None, {})
    return prove_step(step, wanted, factor)


def verify_documents(
    model: torch.nn.Module,
    batch: Mapping[str, Any],
    *,
    run: Callable[..., Any] | None = None,
    documents: Documents = None,
    factor: float = 1.0,
) -> Report:
    """Check that a model keeps the documents of a packed batch apart, on one device; if not, name the layer that mixes.

    All other documents are replaced, and a document's output must not move. The first module whose output moves while
    its inputs do not is named.

    Args:
        model: any module; it is not changed. Weights are random or trained: layers whose weights are 0 cannot leak.
        batch: `input_ids` (or `inputs_embeds`), and other arguments of the model.
        run: your call, `run(model, batch)`, which returns the model's output or (batch, tokens, features); by
            default `model(**batch)`, for models of transformers with `use_cache=False`, as in training.
        documents: lengths, one list or one per batch row. By default from the batch: `cu_seq_lens_q`, `seq_idx`,
            or `position_ids` that start again.
        factor: multiplies the budget, which is the effect of rounding on the model.

    >>> import torch
    >>> class Before(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x + x.roll(1, 1)
    >>> model = torch.nn.Sequential(torch.nn.Embedding(9, 4), torch.nn.Linear(4, 4), Before(), torch.nn.Linear(4, 9))
    >>> ids = {"input_ids": torch.arange(8)[None]}
    >>> report = verify_documents(model, ids, run=lambda m, b: m(b["input_ids"]), documents=[5, 3])
    >>> report.causes, report.findings[0].what
    (('documents leak on one device',), 'mixes documents, first in 2 (Before)')
    >>> model[2] = torch.nn.SiLU()
    >>> verify_documents(model, ids, run=lambda m, b: m(b["input_ids"]), documents=[5, 3]).ok
    True
    """
    from longspan.verification.documents import verify_packed

    return verify_packed(model, batch, run, documents, factor)


def loopback_attention(q: Tensor, k: Tensor, v: Tensor, plan: Plan, **options: Any) -> Tensor:
    """Compute attention of whole tensors with all ranks of the plan in this process; differentiable.

    Options are those of `longspan.attention`. Use it to run plans and `verify` on one machine without a group.

    >>> import torch
    >>> from longspan import attention, layouts, masks, plan
    >>> ring = plan(masks.causal(), layouts.zigzag(8, 2), q_heads=2, kv_heads=2, head_dim=4, dtype="float64")
    >>> q, k, v = torch.randn(3, 1, 2, 8, 4, dtype=torch.float64)
    >>> torch.allclose(loopback_attention(q, k, v, ring), attention(q, k, v, masks.causal()))
    True
    """
    from longspan.testing.loopback import loopback_attention as run

    return run(q, k, v, plan, **options)
