"""Probes of `benchmarks.comparison`. Every probe returns an error relative to the largest reference value, or a
text, or raises the library's exception."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import rival, rival_models

WORLD, HEADS, KV_HEADS, DIM, VALUES, TOKENS, WINDOW = 2, 4, 2, 16, 8, 256, 40
CAP = 0.7
"""Small compared with the scores of random inputs, so that a lost cap is visible."""


@dataclass(frozen=True)
class Probe:
    """One probe: the system, the request, its function, and the packages it needs in addition to PyTorch."""

    system: str
    asks: str
    function: Callable[[], float | str]
    ranks: int = WORLD
    needs: tuple[str, ...] = ()


# -- PyTorch -----------------------------------------------------------------------------------------------------------


def sdpa_causal() -> float:
    """Run causal attention in PyTorch's `context_parallel`."""
    from benchmarks.torch_matrix import by_pytorch, cells

    return by_pytorch(next(cell for cell in cells() if (cell.kind, cell.mask) == ("context", "causal")))


def _mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (WORLD,), mesh_dim_names=("cp",))


def _flex(mask_mod: Any, score_mod: Any = None, tokens: int = TOKENS, backward: bool = False) -> float:
    """Compare PyTorch's flex context parallelism without a balancer with dense attention."""
    from torch.distributed.tensor.experimental import _attention as theirs
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    draw = torch.Generator().manual_seed(0)
    shapes = ((HEADS, DIM), (KV_HEADS, DIM), (KV_HEADS, VALUES))
    q, k, v = (torch.randn(1, heads, tokens, dim, generator=draw) for heads, dim in shapes)
    blocks = create_block_mask(mask_mod, 1, None, tokens, tokens, device="cpu")
    right = _written_out(q.double(), k.double(), v.double(), mask_mod, score_mod)
    mesh = _mesh()
    style = theirs._ContextParallel(2, theirs._ContextParallel.AttentionType.FLEX)
    module = parallelize_module(_Flex(flex_attention, score_mod), mesh, style)
    shards: list[Any] = theirs._context_parallel_shard(mesh, [q, k, v, blocks], [2] * 4, None)
    *leaves, part = shards
    if backward:
        leaves = [leaf.requires_grad_() for leaf in leaves]
    out = module(*leaves, part)
    if backward:
        out.sum().backward()
    (result,) = theirs.context_parallel_unshard(mesh, [out.detach()], [2], None)
    return float((result - right).abs().max() / right.abs().max())


def _written_out(q: Tensor, k: Tensor, v: Tensor, mask_mod: Any, score_mod: Any) -> Tensor:
    k, v = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k, v))
    tokens = q.shape[2]
    b, h = torch.zeros(1, 1, 1, 1, dtype=torch.long), torch.arange(HEADS)[:, None, None]
    i, j = torch.arange(tokens)[:, None], torch.arange(tokens)
    scores = q @ k.mT * DIM**-0.5
    if score_mod is not None:
        scores = score_mod(scores, b, h, i, j)
    return scores.masked_fill(~mask_mod(b, h, i, j), -torch.inf).softmax(-1) @ v


class _Flex(nn.Module):
    def __init__(self, function: Callable[..., Any], score_mod: Any) -> None:
        super().__init__()
        self.function, self.score_mod = function, score_mod

    def forward(self, query: Tensor, key: Tensor, value: Tensor, block_mask: Any) -> Tensor:
        return self.function(query, key, value, score_mod=self.score_mod, block_mask=block_mask, enable_gqa=True)


def _causal(_b: Any, _h: Any, i: Any, j: Any) -> Any:
    return i >= j


def flex_documents() -> float:
    ids = torch.repeat_interleave(torch.arange(3), torch.tensor([100, 30, TOKENS - 130]))
    return _flex(lambda b, h, i, j: (ids[i] == ids[j]) & (i >= j))


def flex_windows() -> float:
    return _flex(lambda b, h, i, j: (i >= j) & (i - j < WINDOW))


def flex_any_mask() -> float:
    return _flex(lambda b, h, i, j: (i >= j) & (((i - j) % 3 != 1) | (i == j)))


def flex_by_distance() -> float:
    """Use a bias that grows with the squared distance: shifting all positions of a rank changes it."""
    return _flex(_causal, lambda s, b, h, i, j: s - ((i - j) / TOKENS) ** 2 * 4)


def flex_soft_cap() -> float:
    return _flex(_causal, lambda s, b, h, i, j: CAP * torch.tanh(s / CAP))


def flex_length() -> float:
    return _flex(_causal, tokens=250)


def flex_backward() -> float:
    return _flex(_causal, backward=True)


def flex_per_document() -> str:
    """Return the work of the busiest rank over the mean, with PyTorch's own balancer for documents."""
    from torch.distributed.tensor.experimental._context_parallel._load_balancer import _PerDocumentHeadTailLoadBalancer

    lengths, ranks = [1024, 128, 256, 640], 4
    order = _PerDocumentHeadTailLoadBalancer([lengths], ranks, "cpu")._generate_indices()[0]
    pairs = torch.cat([torch.arange(1, length + 1) for length in lengths])  # of every query, in its document
    work = pairs[order].view(ranks, -1).sum(1).float()
    return f"the busiest of {ranks} ranks has {float(work.max() / work.mean()):.2f}x the mean work"


# -- torchtitan --------------------------------------------------------------------------------------------------------


def _titan(kind: str, **arguments: Any) -> float:
    """Run torchtitan's context parallelism around one of its attention modules."""
    from torchtitan.distributed.context_parallel import apply_cp_to_forward
    from torchtitan.models.common import attention

    cls = getattr(attention, kind)
    module = cls.__new__(cls)
    nn.Module.__init__(module)
    apply_cp_to_forward([module], _mesh())
    x = torch.randn(1, 128, HEADS, DIM)
    module.forward(x, x, x, **arguments)
    return float("nan")


def titan_score_function() -> float:
    return _titan("FlexAttention", score_mod=lambda s, b, h, i, j: s)


def titan_variable_lengths() -> float:
    return _titan("VarlenAttention")


# -- accelerate and transformers ---------------------------------------------------------------------------------------


def accelerate_windows() -> float:
    from accelerate.big_modeling import _attach_context_parallel_hooks

    _attach_context_parallel_hooks(rival_models.model_of("Gemma 3"))
    return float("nan")


def accelerate_packed() -> float:
    """Run its hooks with packed documents on one device: the mask is removed before attention is called."""
    from accelerate.big_modeling import _attach_context_parallel_hooks

    model = rival_models.model_of("Llama")
    model.set_attn_implementation("sdpa")  # pyright: ignore[reportCallIssue]
    _attach_context_parallel_hooks(model)
    right, _ = rival_models.truth("Llama", "packed")
    result = model(**rival_models.batch_of("packed"), use_cache=False).logits
    return float((result - right).abs().max() / right.abs().max())


def accelerate_recurrent() -> float:
    from accelerate.big_modeling import _refuse_recurrent_layers_under_sequence_parallelism

    _refuse_recurrent_layers_under_sequence_parallelism(rival_models.model_of("Qwen3-Next"))
    return float("nan")


def transformers_families() -> str:
    """Count the causal families of transformers that declare support for its context parallelism."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    total, fine = 0, 0
    read: Any = PreTrainedModel.supports_context_parallel
    for name in modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        try:
            config = CONFIG_MAPPING[name]()
            flag = getattr(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)], "_supports_context_parallel", True)
            fine += bool(read.fget(SimpleNamespace(_supports_context_parallel=flag, config=config)))
        except Exception:
            continue
        total += 1
    return f"{fine} of {total} causal families say yes"


# -- DeepSpeed's Ulysses, as accelerate calls it -----------------------------------------------------------------------


def _ulysses(model: Any, case: str) -> tuple[Tensor, Tensor]:
    """Run Ulysses around "sdpa", since flash attention needs a GPU. Ranks hold contiguous tokens."""
    import deepspeed.comm  # pyright: ignore[reportMissingImports]
    import deepspeed.ops  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.sequence_parallel import parallel_state_sp as state  # pyright: ignore[reportMissingImports]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import (  # pyright: ignore[reportMissingImports]
        UlyssesSPAttentionHF,
    )
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # compiling it would take minutes
    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo")
    state._SEQUENCE_PARALLEL_GROUP = state._SEQUENCE_DATA_PARALLEL_GROUP = None  # of the last model
    batch = rival_models.batch_of(case)
    rows, tokens = batch["input_ids"].shape
    batch.setdefault("position_ids", torch.arange(tokens).expand(rows, -1))
    model.set_attn_implementation("sdpa")
    places = torch.arange(tokens).chunk(dist.get_world_size())[dist.get_rank()]
    kept = ALL_ATTENTION_FUNCTIONS["sdpa"]
    try:
        UlyssesSPAttentionHF.register_with_transformers(model, "sdpa", dist.get_world_size(), rows)
        shards = {name: whole[:, places].contiguous() for name, whole in batch.items()}
        return model(**shards, use_cache=False).logits, places
    finally:
        ALL_ATTENTION_FUNCTIONS["sdpa"] = kept


def _by_ulysses(family: str, case: str) -> float:
    result = rival.measured(_ulysses, family, case)
    return max(result.logits, result.gradients)


def ulysses_plain() -> float:
    return _by_ulysses("Llama", "plain")


def ulysses_packed() -> float:
    return _by_ulysses("Llama", "packed")


def ulysses_window() -> float:
    return _by_ulysses("Mistral", "plain")


def ulysses_convolutions() -> float:
    return _by_ulysses("LFM2", "plain")


def ulysses_sinks() -> float:
    return _by_ulysses("GPT-OSS", "plain")


# -- fla ---------------------------------------------------------------------------------------------------------------


def fla_on_cpu() -> float:
    from fla.ops.cp.context import _check_cp_device  # pyright: ignore[reportMissingImports]

    _check_cp_device(torch.device("cpu"))
    return float("nan")


def fla_length() -> float:
    """Run 101 tokens on two ranks."""
    from fla.ops.cp import build_cp_context  # pyright: ignore[reportMissingImports]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build_cp_context(torch.tensor([0, 101]), dist.group.WORLD)
    return float("nan")


# -- diffusers ---------------------------------------------------------------------------------------------------------


def _by_diffusers(
    family: str, *, masked: bool = False, tokens: int = 16, backward: bool = False, patched: bool = True, **config: Any
) -> float:
    """Run a tiny model of diffusers over ranks. `patched`: pretend that CPUs are accelerators, which it demands."""
    import diffusers  # pyright: ignore[reportMissingImports]

    draw = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    torch.manual_seed(0)
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_layers": 1}
    if family == "Flux":
        model = diffusers.FluxTransformer2DModel(
            patch_size=1, in_channels=4, num_single_layers=1, attention_head_dim=16, joint_attention_dim=32,
            pooled_projection_dim=32, axes_dims_rope=[4, 4, 8], **heads,
        )  # fmt: skip
        places = torch.stack((torch.zeros(tokens), torch.arange(tokens) // 4, torch.arange(tokens) % 4), 1)
        inputs = {
            "hidden_states": random(1, tokens, 4), "encoder_hidden_states": random(1, 8, 32),
            "pooled_projections": random(1, 32), "timestep": torch.ones(1), "img_ids": places,
            "txt_ids": torch.zeros(8, 3),
        }  # fmt: skip
    elif family == "LTX":
        model = diffusers.LTXVideoTransformer3DModel(
            in_channels=8, out_channels=8, attention_head_dim=8, cross_attention_dim=32, caption_channels=32,
            qk_norm="rms_norm_across_heads", **heads,
        )  # fmt: skip
        valid = torch.ones(1, 8, dtype=torch.long)
        valid[:, 5:] = not masked
        inputs = {
            "hidden_states": random(1, 32, 8), "encoder_hidden_states": random(1, 8, 32),
            "timestep": torch.tensor([500]), "encoder_attention_mask": valid, "num_frames": 2, "height": 4, "width": 4,
        }  # fmt: skip
    else:
        model = diffusers.HunyuanVideoTransformer3DModel(
            in_channels=4, out_channels=4, attention_head_dim=10, num_single_layers=1, num_refiner_layers=1,
            patch_size=1, text_embed_dim=16, pooled_projection_dim=8, rope_axes_dim=(2, 4, 4), **heads,
        )  # fmt: skip
        inputs = {}
    right = model(**inputs, return_dict=False)[0].detach() if inputs else torch.ones(1)
    if patched:
        torch._C._get_accelerator = lambda *_: torch.device("cpu")  # pyright: ignore[reportAttributeAccessIssue]
        torch.accelerator.device_count = lambda: WORLD
    model.enable_parallelism(config=diffusers.ContextParallelConfig(**config))
    out = model(**inputs, return_dict=False)[0]
    if backward:
        out.sum().backward()
    return float((out.detach() - right).abs().max() / right.abs().max())


def diffusers_on_cpu() -> float:
    return _by_diffusers("Flux", patched=False, ulysses_degree=WORLD)


def diffusers_ulysses() -> float:
    return _by_diffusers("Flux", ulysses_degree=WORLD, backward=True)


def diffusers_ring() -> float:
    return _by_diffusers("Flux", ring_degree=WORLD)


def diffusers_length() -> float:
    return _by_diffusers("Flux", tokens=15, ulysses_degree=WORLD)


def diffusers_any_length() -> float:
    return _by_diffusers("Flux", ulysses_degree=WORLD, ulysses_anything=True, backward=True)


def diffusers_text_mask() -> float:
    return _by_diffusers("LTX", masked=True, ulysses_degree=WORLD)


def diffusers_without_plan() -> float:
    return _by_diffusers("HunyuanVideo", ulysses_degree=WORLD)


HF, DS = ("transformers",), ("transformers", "deepspeed")
DIFFUSERS = ("diffusers",)
PROBES: dict[str, Probe] = {
    "sdpa-causal": Probe("PyTorch, SDPA", "causal attention", sdpa_causal),
    "flex-documents": Probe("PyTorch, flex", "packed documents, forward", flex_documents),
    "flex-windows": Probe("PyTorch, flex", "a window, forward", flex_windows),
    "flex-mask": Probe("PyTorch, flex", "any mask function, forward", flex_any_mask),
    "flex-score": Probe("PyTorch, flex", "a bias by distance squared, forward", flex_by_distance),
    "flex-softcap": Probe("PyTorch, flex", "a soft cap, values half as wide as keys, forward", flex_soft_cap),
    "flex-length": Probe("PyTorch, flex", "250 tokens", flex_length),
    "flex-backward": Probe("PyTorch, flex", "backward", flex_backward),
    "flex-per-document": Probe(
        "PyTorch, flex", "its per-document balancer, documents of 1024, 128, 256 and 640 tokens", flex_per_document, 1
    ),
    "titan-score": Probe("torchtitan", "a score function", titan_score_function, needs=("torchtitan",)),
    "titan-varlen": Probe("torchtitan", "its variable-length attention", titan_variable_lengths, needs=("torchtitan",)),
    "accelerate-windows": Probe("accelerate", "Gemma 3: windows", accelerate_windows, 1, (*HF, "accelerate")),
    "accelerate-packed": Probe("accelerate", "Llama, packed documents", accelerate_packed, 1, (*HF, "accelerate")),
    "accelerate-recurrent": Probe(
        "accelerate, Ulysses", "Qwen3-Next: recurrent layers", accelerate_recurrent, 1, (*HF, "accelerate")
    ),
    "transformers-families": Probe(
        "transformers", "`supports_context_parallel`, default configurations", transformers_families, 1, HF
    ),
    "ulysses-plain": Probe("DeepSpeed, Ulysses", "Llama", ulysses_plain, needs=DS),
    "ulysses-packed": Probe("DeepSpeed, Ulysses", "Llama, packed documents, sdpa", ulysses_packed, needs=DS),
    "ulysses-window": Probe("DeepSpeed, Ulysses", "Mistral: a window, sdpa", ulysses_window, needs=DS),
    "ulysses-conv": Probe("DeepSpeed, Ulysses", "LFM2: short convolutions", ulysses_convolutions, needs=DS),
    "ulysses-sinks": Probe("DeepSpeed, Ulysses", "GPT-OSS: sinks, sdpa", ulysses_sinks, needs=DS),
    "fla-cpu": Probe("fla", "recurrences on CPUs", fla_on_cpu, 1, ("fla",)),
    "fla-length": Probe("fla", "101 tokens on 2 ranks", fla_length, needs=("fla",)),
    "diffusers-cpu": Probe("diffusers", "Flux on CPUs", diffusers_on_cpu, needs=DIFFUSERS),
    "diffusers-ulysses": Probe(
        "diffusers, Ulysses", "Flux on CPUs as accelerators; backward runs", diffusers_ulysses, needs=DIFFUSERS
    ),
    "diffusers-ring": Probe("diffusers, ring", "Flux on CPUs as accelerators", diffusers_ring, needs=DIFFUSERS),
    "diffusers-length": Probe("diffusers, Ulysses", "Flux, 15 tokens on 2 ranks", diffusers_length, needs=DIFFUSERS),
    "diffusers-any-length": Probe(
        "diffusers, Ulysses Anything",
        "Flux, backward of its mode for any length",
        diffusers_any_length,
        needs=DIFFUSERS,
    ),
    "diffusers-mask": Probe("diffusers, Ulysses", "LTX with a mask of its text", diffusers_text_mask, needs=DIFFUSERS),
    "diffusers-plan": Probe("diffusers, Ulysses", "HunyuanVideo", diffusers_without_plan, needs=DIFFUSERS),
}
