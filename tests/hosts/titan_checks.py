"""What test_torchtitan asks without training: what is refused, what masks mean, what one call computes. Runs in the
processes of titan_work.py."""

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import and_masks, create_block_mask
from torchtitan.components.validate import Validator
from torchtitan.config import ConfigManager
from torchtitan.models.common import Conv1d
from torchtitan.models.common.attention import (
    FlexAttention,
    ScaledDotProductAttention,
    VarlenAttention,
    create_varlen_metadata_for_document,
    get_causal_mask_mod,
    get_document_mask_mod,
    get_efficient_causal_mask_mod_for_packed_document,
    get_fixed_block_mask_mod,
    get_sliding_window_mask_mod,
)
from torchtitan.models.flux.config_registry import flux_debugmodel
from torchtitan.models.gpt_oss.config_registry import gpt_oss_debugmodel
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan.protocols.module import Module

import longspan.torchtitan as titan
from longspan.layouts import contiguous
from longspan.masks import causal
from longspan.torchtitan.masks import Shards, TitanError, check_version, layout_of, mask_of, mask_of_mods
from tests.hosts.titan_work import OVERRIDES


def parsed(*args, config="llama3_debugmodel"):
    return ConfigManager().parse_args(["--module", "longspan.torchtitan", "--config", config, *args])


class TinyDeltaNet(Module):
    """Stands for Qwen3.5's, which needs a package to be imported."""

    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        conv: Conv1d.Config | None = None


def convolved(width):
    return TinyMixer.Config(conv=Conv1d.Config(in_channels=4, out_channels=4, kernel_size=width))


class TinyMixer(Module):
    @dataclass(kw_only=True, slots=True)
    class Config(Module.Config):
        conv: Conv1d.Config


def mixed(layer):
    """A model of one's own with this layer in the place of a feed-forward layer."""
    config = llama3_debugmodel()
    config.model_spec.model.layers[1].feed_forward = layer
    return replace(config, model_spec=replace(config.model_spec, name="own"))


def refusals():
    """The message of everything that is refused, by name."""
    q = torch.zeros(1, 8, 2, 16)
    dtensor = DTensor.from_local(q, init_device_mesh("cpu", (1,)))
    shards = Shards(causal(8), contiguous(8, 1), None)
    attention = titan.LongspanAttention(titan.LongspanAttention.Config())
    split = titan.LongspanAttention(titan.LongspanAttention.Config())
    split.heads_split = 2
    flex = {"kernel_options": FlexAttention.Config(kernel_options={"BACKEND": "FLASH"}),
            "bidirectional": VarlenAttention.Config(window_size=(-1, -1)),
            "sdpa": ScaledDotProductAttention.Config()}  # fmt: skip

    def inner(name):
        config = llama3_debugmodel()
        config.model_spec.model.layers[1].attention.inner_attention = flex[name]
        return titan.with_longspan(config)

    def named(name):
        config = llama3_debugmodel()
        return replace(config, model_spec=replace(config.model_spec, name=name))

    def hollow():
        config = llama3_debugmodel()
        config.model_spec.model.layers = []
        return config

    def batch(**tensors):
        return titan._shard_batch(tensors, q, None, None, None)

    cases = {
        "newer version": lambda: check_version("0.4.0"),
        "no version": lambda: check_version(None),
        "spmd_types": lambda: titan.check_config(parsed("--parallelism.spmd_backend", "spmd_types")),
        "full_dtensor": lambda: titan.check_config(parsed("--parallelism.spmd_backend", "full_dtensor")),
        "pipeline": lambda: titan.check_config(parsed("--parallelism.pipeline_parallel_degree", "2")),
        "experts": lambda: titan.check_config(parsed("--parallelism.expert_parallel_degree", "2")),
        "compile": lambda: titan.check_config(parsed("--compile.enable")),
        "graphs": lambda: titan.check_config(parsed("--training.no-disable_cuda_graphs")),
        "balancer": lambda: titan.check_config(parsed("--parallelism.context_parallel_load_balancer", "zigzag")),
        "validator": lambda: titan.check_config(replace(parsed(), validator=Validator.Config(enable=True))),
        "ptrr length": lambda: layout_of("ptrr", {None: causal(96)}, 96, 2, None),
        "ptrr key": lambda: layout_of("ptrr", {"a": causal(256), "b": causal(256)}, 256, 2, None),
        "trainer": lambda: titan.with_longspan(flux_debugmodel()),
        "model": lambda: titan.with_longspan(named("hybrid")),
        "hybrid config": lambda: titan.qwen35_debugmodel(),
        "other config": lambda: titan.kimi_k2_5_debugmodel(),
        "hybrid": lambda: titan.with_longspan(mixed(TinyDeltaNet.Config()), any_model=True),
        "convolution": lambda: titan.with_longspan(mixed(convolved(4)), any_model=True),
        "built hybrid": lambda: titan._parallelize(torch.nn.ModuleDict({"mixer": torch.nn.GRU(2, 2)}),
                                                   parallel_dims=None, titans=None),
        "kernel_options": lambda: inner("kernel_options"),
        "bidirectional": lambda: inner("bidirectional"),
        "sdpa": lambda: inner("sdpa"),
        "block mask": lambda: attention(q, q, q, attention_masks=create_block_mask(_causal, 1, 1, 8, 8, device="cpu")),
        "dtensor": lambda: attention(dtensor, dtensor, dtensor, attention_masks=shards),
        "scores of split heads": lambda: split(q, q, q, attention_masks=shards, score_mod=lambda score, *_: score),
        "unknown argument": lambda: attention(q, q, q, attention_masks=shards, is_causal=False),
        "varlen metadata": lambda: mask_of(create_varlen_metadata_for_document(torch.arange(8)[None]), 1, 8),
        "short block mask": lambda: mask_of(create_block_mask(_causal, 1, 1, 8, 8, device="cpu"), 1, 16),
        "3-d positions": lambda: mask_of_mods(torch.zeros(3, 1, 8), [_causal]),
        "no attention": lambda: titan.with_longspan(hollow()),
        "images": lambda: batch(input=q, positions=q, pixel_values=q),
        "no positions": lambda: batch(input=q),
        "overridden": lambda: parsed("--override.imports", *OVERRIDES, "tests.hosts.titan_work.dense").build(),
    }  # fmt: skip
    titan.with_longspan(mixed(convolved(1)), any_model=True)  # no token meets another in it
    messages = {}
    for name, case in cases.items():
        try:
            case()
            messages[name] = "nothing was refused"
        except TitanError as error:
            messages[name] = str(error)
    return messages


def masks():
    """For several sets of mask functions: whether they are in closed form, and how many pairs are told wrongly."""
    found = {}
    for rows in (1, 3):
        generator = torch.Generator().manual_seed(rows)
        starts = torch.rand(rows, 70, generator=generator) < 0.1
        starts[:, 0] = True
        counts = torch.arange(70).expand(rows, -1)
        positions = counts - torch.where(starts, counts, 0).cummax(dim=1).values
        packed = get_efficient_causal_mask_mod_for_packed_document(positions)
        other = get_document_mask_mod(torch.arange(70).expand(rows, -1))  # made from other positions
        cases = {
            "packed": [get_causal_mask_mod(), packed],
            "packed window": [get_sliding_window_mask_mod(9), packed],
            "packed alone": [packed],
            "documents": [get_document_mask_mod(positions)],
            "documents of others": [get_causal_mask_mod(), other],
            "chunks": [get_causal_mask_mod(), get_fixed_block_mask_mod(16)],
            "own function": [get_causal_mask_mod(), packed, lambda b, h, q, kv: (q + kv + b) % 3 != 0],
        }
        for name, mods in cases.items():
            mask = mask_of_mods(positions, mods)
            b, i, j = torch.arange(rows)[:, None, None], torch.arange(70)[:, None], torch.arange(70)
            meant = and_masks(*mods)(b, torch.tensor(0), i, j).expand(rows, 70, 70)
            given = [mask.allows(i.numpy(), j.numpy(), row=row % mask.num_rows) for row in range(rows)]
            wrong = (torch.as_tensor(np.stack(given)) != meant).sum()
            found[f"{name}, {rows} rows"] = mask.is_structured, int(wrong), int(meant.sum())
    return found


def windows():
    """How many pairs each of the two kinds of layers of GPT-OSS allows, and how far back its VarlenAttention saw."""
    config = titan.with_longspan(gpt_oss_debugmodel())
    with torch.device("meta"):
        model = config.model_spec.model.build()
    dims = SimpleNamespace(tp=1, cp=1, cp_enabled=False, get_mesh=lambda _: None)
    titan._parallelize(model, parallel_dims=dims, titans=lambda model, **_: model)
    positions = torch.cat([torch.arange(30), torch.arange(170)])[None]
    batch = {"input": positions, "positions": positions}
    *_, given = titan._shard_batch(batch, positions, model, dims, config.parallelism)
    lefts = {module.left for module in model.modules() if isinstance(module, titan.LongspanAttention)}
    return {name: shards.mask.area() for name, shards in given["attention_masks"].items()}, sorted(lefts)


def lengths():
    """The labels of all ranks' shards of 7 tokens over 3 ranks."""
    model = SimpleNamespace(get_attention_masks=lambda positions: causal(7))
    tokens = torch.arange(1, 8)[None]
    shards = []
    for rank in range(3):
        mesh = SimpleNamespace(size=lambda: 3, get_local_rank=lambda rank=rank: rank)
        dims = SimpleNamespace(cp_enabled=True, get_mesh=lambda _, mesh=mesh: mesh)
        batch = {"input": tokens, "positions": tokens - 1}
        shards.append(titan._shard_batch(batch, tokens, model, dims, parsed().parallelism)[1])
    return [shard.tolist() for shard in shards]


def call():
    """The largest error of attention with a score function and a transform of its output, against dense formulas."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 33, heads, 16, dtype=torch.float64, requires_grad=True) for heads in (4, 2, 2))
    sinks = torch.randn(4, dtype=torch.float64, requires_grad=True)
    slope = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    i, j = torch.arange(33)[:, None], torch.arange(33)

    def transform(out, lse):
        return out * torch.sigmoid(lse - sinks)[..., None]

    attention = titan.LongspanAttention(titan.LongspanAttention.Config(left=7))
    ours = attention(
        q, k, v, attention_masks=Shards(causal(33), contiguous(33, 1), None), scale=0.2, enable_gqa=True,
        score_mod=lambda score, b, h, q_idx, kv_idx: score - slope * (q_idx - kv_idx), out_transform=transform,
    )  # fmt: skip
    keys, values = (t.repeat_interleave(2, dim=2).transpose(1, 2) for t in (k, v))
    scores = 0.2 * q.transpose(1, 2) @ keys.mT - slope * (i - j)
    scores = scores.masked_fill((j > i) | (i - j > 7), -torch.inf)
    meant = transform((scores.softmax(-1) @ values).transpose(1, 2), scores.logsumexp(-1).transpose(1, 2))
    weight = torch.randn_like(meant)
    leaves = q, k, v, sinks, slope
    grads = [torch.autograd.grad((out * weight).sum(), leaves) for out in (ours, meant)]
    errors = [(ours - meant).abs().max(), *((a - b).abs().max() for a, b in zip(*grads, strict=True))]
    return max(float(error.detach()) for error in errors)


def _causal(b, h, q, kv):
    return q >= kv


CHECKS = {"refusals": refusals, "masks": masks, "windows": windows, "call": call, "lengths": lengths}
