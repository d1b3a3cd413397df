"""torchtitan with Longspan's attention, exact for packed documents and windows over the cp axis.

    torchrun ... -m torchtitan.train --module longspan.torchtitan --config llama3_8b \\
        --parallelism.context_parallel_degree 8

`--config` names any config of torchtitan's own models; pass your own configs through `with_longspan`. torchtitan's
hooks do the rest: a config registry, a `Trainer` whose `post_dataloading_process` shards by our layout, an inner
attention module, a `parallelize_fn`. Tested with one version of torchtitan; others are refused.
"""

from __future__ import annotations

import copy
import importlib
import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from longspan.api import flex_attention
from longspan.api import plan as make_plan
from longspan.masks import sliding_window
from longspan.torchtitan.masks import (
    Shards,
    TitanError,
    check_balancer,
    check_mixers,
    check_version,
    family_of,
    layout_of,
    mask_of_mods,
    masks_by_name,
)

try:
    from torchtitan.components.validate import Validator
    from torchtitan.config.override import derive
    from torchtitan.models.common.attention import (
        BaseAttention,
        FlexAttention,
        ScaledDotProductAttention,
        VarlenAttention,
    )
    from torchtitan.models.common.decoder import Decoder
    from torchtitan.protocols.module import Module
    from torchtitan.trainer import Trainer
except ImportError as error:
    version = next((one.version for one in metadata.distributions(name="torchtitan")), None)
    check_version(version)
    raise TitanError(f"torchtitan {version} does not load: {error}. It needs triton, also without a GPU.") from error

check_version(metadata.version("torchtitan"))

MODELS = ("deepseek_v3", "gpt_oss", "llama3", "qwen3")
"""Families in which inner attention alone mixes tokens, so that the rest of the model works on shards."""


# -- Attention ---------------------------------------------------------------------------------------------------------


class LongspanAttention(FlexAttention):
    """Inner attention of a rank's tokens over the whole sequence. A FlexAttention, because torchtitan makes masks for
    that class only."""

    @dataclass(kw_only=True, slots=True)
    class Config(FlexAttention.Config):
        left: int = -1
        """Tokens before the query that this layer sees; -1 sees all that the mask allows."""

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.left = config.left
        self.heads_split = 1  # over how many ranks of the tp axis

    def forward(  # the names of q, k and v are torchtitan's: its sharding configs refer to them
        self,
        q_BLNH: Tensor,
        k_BLNH: Tensor,
        v_BLNH: Tensor,
        *,
        attention_masks: Any,
        score_mod: Any = None,
        scale: float | None = None,
        enable_gqa: bool = False,
        out_transform: Callable[[Tensor, Tensor], Tensor] | None = None,
        **unknown: Any,
    ) -> Tensor:
        if not isinstance(attention_masks, Shards):
            raise TitanError(
                f"attention_masks must be those of LongspanTrainer, but got {type(attention_masks).__name__}. Train"
                f" with a config of with_longspan(...); for one call, use longspan.flex_attention."
            )
        if isinstance(q_BLNH, DTensor):
            raise TitanError(
                f"attention takes local tensors, but got DTensors placed {q_BLNH.placements}. Use"
                f" --parallelism.spmd_backend partial_dtensor."
            )
        if any(value is not None for value in unknown.values()):
            raise TitanError(f"attention does not support {', '.join(sorted(unknown))}, and would have to drop it.")
        if score_mod is not None and self.heads_split > 1:
            raise TitanError(
                f"score_mod is not supported with heads split over {self.heads_split} ranks: it would get the numbers"
                f" of this rank's heads, from 0 up. Use --parallelism.tensor_parallel_degree 1."
            )
        q, k, v = (t.transpose(1, 2) for t in (q_BLNH, k_BLNH, v_BLNH))
        mask, layout = attention_masks.mask, attention_masks.layout
        if self.left >= 0:
            mask = mask & sliding_window(self.left)
        plan = make_plan(
            mask, layout, q_heads=q.shape[1], kv_heads=k.shape[1], head_dim=q.shape[3], v_head_dim=v.shape[3],
            batch=q.shape[0], dtype=q.dtype, group=attention_masks.mesh,
        )  # fmt: skip
        out, lse = flex_attention(
            q, k, v, score_mod, None, scale, enable_gqa, return_lse=True, plan=plan, group=attention_masks.mesh,
            captured_grads="share",  # FSDP sums gradients over the cp axis
        )  # fmt: skip
        out = out.transpose(1, 2)
        return out if out_transform is None else out_transform(out, lse.transpose(1, 2))


# -- Training ----------------------------------------------------------------------------------------------------------


def _shard_batch(
    input_dict: dict[str, Tensor], labels: Tensor, model: Any, dims: Any, parallelism: Any
) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Return this rank's tokens, labels (which torchtitan's data loaders have shifted), positions and masks."""
    unknown = sorted(input_dict.keys() - {"input", "positions"})
    if unknown or "positions" not in input_dict:
        raise TitanError(
            f"a batch has {', '.join(sorted(input_dict))}, but must have 'input' and 'positions' alone: positions tell"
            f" where documents start, and it is not known how to shard anything else."
        )
    tokens, positions = input_dict["input"], input_dict["positions"]
    batch, length = tokens.shape
    mesh = dims.get_mesh("cp") if dims.cp_enabled else None
    size, rank = (1, 0) if mesh is None else (mesh.size(), mesh.get_local_rank())
    masks = masks_by_name(model.get_attention_masks(positions=positions), batch, length)
    key = parallelism.context_parallel_ptrr_mask_key
    layout = layout_of(parallelism.context_parallel_load_balancer, masks, length, size, key)
    shards = {name: Shards(mask, layout, mesh) for name, mask in masks.items()}
    tokens, labels, positions = (layout.shard(t, rank, 1) for t in (tokens, labels, positions))  # without padding
    return tokens, labels, {"positions": positions, "attention_masks": shards.get(None, shards)}


class LongspanValidator(Validator):
    """torchtitan's validation on shards."""

    @dataclass(kw_only=True, slots=True)
    class Config(Validator.Config):
        pass

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor, model_parts: list[nn.Module]
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        return _shard_batch(input_dict, labels, model_parts[0], self.parallel_dims, self.parallelism)


class LongspanTrainer(Trainer):
    """torchtitan's training on shards. Everything else, such as loss normalisation, is torchtitan's."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        pass

    def __init__(self, config: Config) -> None:
        check_config(config)
        super().__init__(config)

    def post_dataloading_process(
        self, input_dict: dict[str, Tensor], labels: Tensor
    ) -> tuple[Tensor, Tensor, dict[str, Any]]:
        parts = _shard_batch(input_dict, labels, self.model_parts[0], self.parallel_dims, self.config.parallelism)
        self.ntokens_seen += parts[1].numel()
        return parts


def check_config(config: Trainer.Config) -> None:
    """Raise for settings, from the command line too, that would not be exact or were not tested."""
    parallelism, compiled = config.parallelism, config.compile
    check_balancer(parallelism.context_parallel_load_balancer)
    refusals = {
        f"parallelism.spmd_backend = {parallelism.spmd_backend!r}": (
            parallelism.spmd_backend != "partial_dtensor",
            "There torchtitan gathers keys and values itself. Use 'partial_dtensor', as with_longspan(...) sets it.",
        ),
        f"parallelism.pipeline_parallel_degree = {parallelism.pipeline_parallel_degree}": (
            parallelism.pipeline_parallel_degree > 1,
            "Stages of a pipeline would need the layout of every microbatch, which is not implemented. Use 1.",
        ),
        f"parallelism.expert_parallel_degree = {parallelism.expert_parallel_degree}": (
            parallelism.expert_parallel_degree > 1,
            "Expert parallelism with Longspan was not tested. Use 1.",
        ),
        f"compile.enable with components {compiled.components}": (
            compiled.enable and "model" in compiled.components,
            "Every batch has a plan of its own, and torchtitan compiles layers whole, so each batch would compile them"
            " again. Leave 'model' out of compile.components.",
        ),
        "training.disable_cuda_graphs = False": (
            not config.training.disable_cuda_graphs,
            "A replayed graph would use the first batch's plan for all. Use --training.disable_cuda_graphs.",
        ),
        f"validator = {type(config.validator).__qualname__}": (
            config.validator.enable and not isinstance(config.validator, LongspanValidator.Config),
            "It would shard by another layout. Use LongspanValidator.Config, or turn validation off.",
        ),
    }
    for setting, (is_refused, remedy) in refusals.items():
        if is_refused:
            raise TitanError(f"{setting} is not supported with attention by Longspan. {remedy}")


def _parallelize(model: Any, *, parallel_dims: Any, titans: Callable[..., nn.Module], **options: Any) -> nn.Module:
    """Call torchtitan's own function without a cp axis, for which it would wrap attention in a gather of all keys and
    values. FSDP still spans the cp axis, since the meshes are built before."""
    check_mixers(type(model).__name__, model.named_modules())
    for name, module in model.named_modules():
        if isinstance(module, LongspanAttention):
            module.heads_split = parallel_dims.tp
        elif isinstance(module, FlexAttention | VarlenAttention | ScaledDotProductAttention):
            raise TitanError(
                f"{name} is {type(module).__name__}, not LongspanAttention: it would attend to this rank's tokens"
                f" alone. Do not override inner attention after with_longspan(...)."
            )
    if type(model)._create_flex_attention_mask is Decoder._create_flex_attention_mask:  # others make a BlockMask
        model._create_flex_attention_mask = lambda positions, _, mask_mods: mask_of_mods(positions, mask_mods)
    parallel_dims.get_mesh("fsdp")
    dims = copy.copy(parallel_dims)
    dims.cp = 1
    return titans(model, parallel_dims=dims, **options)


# -- Configs -----------------------------------------------------------------------------------------------------------


def with_longspan(config: Trainer.Config, *, any_model: bool = False) -> LongspanTrainer.Config:
    """Return the config of the same training with attention by Longspan; it reuses parts of `config`.

    Sets `parallelism.spmd_backend` to "partial_dtensor", `parallelism.context_parallel_load_balancer` to "balanced" and
    `training.disable_cuda_graphs`; the command line may name another balancer. `any_model` admits models of your own:
    set it only if nothing but inner attention mixes tokens (no vision encoder). Linear attention, other recurrences and
    convolutions are refused with it, too, if their names are known.
    """
    spec = config.model_spec
    if type(config) is not Trainer.Config or type(config.validator) is not Validator.Config or spec is None:
        classes = f"{type(config).__qualname__} with {type(config.validator).__qualname__}"
        raise TitanError(
            f"with_longspan takes a Trainer.Config with a model_spec and a Validator.Config, but got {classes}:"
            f" trainers and validators of other classes shard batches themselves. Derive them from LongspanTrainer."
        )
    check_mixers(spec.name, ((name, layer) for name, layer, _, _ in spec.traverse(Module.Config, recurse=True)))
    if spec.name not in MODELS and not any_model:
        raise TitanError(
            f"the model must be one of {', '.join(MODELS)}, which mix tokens in inner attention alone, but got"
            f" {spec.name!r}. If yours does too, pass with_longspan(config, any_model=True)."
        )
    layers: list[Any] = list(spec.traverse(BaseAttention.Config, recurse=True))
    for name, layer, _, _ in layers:
        layer.inner_attention = _replacement(name, layer.inner_attention)
    if not layers:
        raise TitanError(f"model {spec.name!r} has no attention whose inner_attention could be replaced.")
    parallelism = replace(config.parallelism, spmd_backend="partial_dtensor", context_parallel_load_balancer="balanced")
    return derive(
        config, LongspanTrainer.Config, parallelism=parallelism,
        model_spec=replace(spec, parallelize_fn=partial(_parallelize, titans=spec.parallelize_fn)),
        training=replace(config.training, disable_cuda_graphs=True),
        validator=derive(config.validator, LongspanValidator.Config),
    )  # fmt: skip


def _replacement(name: str, inner: Any) -> LongspanAttention.Config:
    """Return the config of our attention that is equivalent to torchtitan's."""
    if type(inner) is FlexAttention.Config and not inner.kernel_options:
        return derive(inner, LongspanAttention.Config)
    if type(inner) is VarlenAttention.Config and inner.window_size[1] == 0:
        return derive(inner, LongspanAttention.Config, left=inner.window_size[0])
    raise TitanError(
        f"{name}.inner_attention is {inner}. FlexAttention without kernel_options (they tune PyTorch's kernels) and"
        f" causal VarlenAttention can be replaced; build the model with attn_backend='flex'."
    )


def _configs() -> dict[str, Callable[[], Trainer.Config]]:
    """Return torchtitan's config functions by name."""
    configs: dict[str, Callable[[], Trainer.Config]] = {}
    for model in MODELS:
        registry = importlib.import_module(f"torchtitan.models.{model}.config_registry")
        for name, value in vars(registry).items():
            own = getattr(value, "__module__", None) == registry.__name__ and not name.startswith("_")
            if own and inspect.isfunction(value) and not inspect.signature(value).parameters:
                configs[name] = value
    return configs


def __getattr__(name: str) -> Callable[[], LongspanTrainer.Config]:
    """Return torchtitan's config of this name, with Longspan: torchtitan looks `--config` up in `--module`."""
    config = None if name.startswith("_") else _configs().get(name)
    if config is not None:
        return lambda: with_longspan(config())
    family = None
    if not name.startswith("_"):
        family = family_of(name, importlib.import_module("torchtitan.models").__path__)
    if family is None:
        raise AttributeError(
            f"longspan.torchtitan has no attribute, and torchtitan's {', '.join(MODELS)} no config, {name!r}"
        )
    return partial(_refuse, name, *family)


def _refuse(name: str, family: str, mixers: list[str]) -> LongspanTrainer.Config:
    """Raise for a config of torchtitan that Longspan does not support."""
    hybrid = f" Its {' and '.join(mixers)} would start from an empty state on every rank." if mixers else ""
    raise TitanError(
        f"config {name!r} is of torchtitan's model {family!r}, which is not among those known to mix tokens in inner"
        f" attention alone: {', '.join(MODELS)}.{hybrid}"
    )


def __dir__() -> list[str]:
    return [*globals(), *_configs()]
