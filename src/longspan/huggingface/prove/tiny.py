"""Shrink a model's configuration, and build a model from it: the same code, computed in a moment on a CPU.

    tiny = tiny_config(config)         # of the same class: a layer of every kind, small sizes, no dropout
    model = build(LlamaForCausalLM, tiny)

Values that decide *what* is computed (activations, soft caps, scales, biases, rotary embeddings, tied weights) stay.
Sizes become small, by the names of attributes and by how their values are related, so that unknown families work too:
heads keep their kind of ratio, features are heads times features per head where they were, and equal sizes stay equal.
`_adjust` handles families whose sizes are related in other ways.
"""

from __future__ import annotations

import copy
import itertools
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

__all__ = ["CannotShrinkError", "build", "special_tokens", "tiny_config"]

VOCABULARY = 128
SWITCH = 24
"""Where rotary embeddings change that know short and long sequences: beyond a rank's tokens, within a test's."""
ORDINARY = 64
"""Special tokens below it keep their number."""
SECTIONS = ("mrope_section", "xdrope_section")
HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_dim")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num", "num_query_groups")
HEAD_DIM = ("head_dim", "kv_channels", "d_kv", "d_head", "attention_head_size", "dim_head", "attention_head_dim")
MAMBA_HEADS = (
    ("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)  # fmt: skip
KEPT = re.compile(
    r"^(patch_size|codebook_size)$|kernel|stride|_token_id$|_token_index$|_factor$|temperature|_merge_size$"
)
"""Numbers that decide what is computed, not how much."""
LIMITS = tuple((limit, re.compile(names)) for limit, names in (
    (VOCABULARY, r"vocab_size|num_embeddings$|_vocab$"),
    (SWITCH, r"^original_max_position_embeddings$"),
    (128, r"^(n_positions|n_ctx|max_seq_len|context_length|seq_length|model_max_length|max_target_positions)$"
          r"|max_position_embeddings$|max_sequence_length|max_source_positions"),
    (5, r"^floor_scale$"),
    (7, r"sliding_window(_size)?$|^attention_window_size$|^local_window"),
    (8, r"^(local_attention|attention_window)$|chunk_size$|chunk_length$|^block_size$|state_size$|d_state$|^index_topk"
        r"|^qk_rope_head_dim$"),
    (4, r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$|^mm_tokens_per_image$"
        r"|^linear_num_heads$|dt_rank$|time_step_rank$"),
    (1, r"^topk_group$"),
    (2, r"^(num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts)$|^(n_group|num_expert_group)$"
        r"|shared_experts$|^zero_expert_num$|^index_n_heads$|^linear_num_key_heads$|n_?groups$"),
    (24, r"^q_lora_rank$"),
    (16, r"^(kv|o)_lora_rank$|^v_head_dim$|^index_head_dim$|^linear_(key_|value_)?head_dim$|per_layer_input$"),
    (48, r"intermediate|ffn_dim|ffn_hidden_size|^d_ff$|^n_inner$|^dim_ff$|^dff$|^mlp_dim$|^hidden_dim$|^d_inner$"
         r"|feed_forward_size|expert_dim"),
))  # fmt: skip
"""The largest value of numbers with these names; the first that matches counts."""
WIDTHS = re.compile(r"(_size|_dim|_rank|_width|_channels|_features)$")
SIZED_LISTS = re.compile(
    r"^(intermediate_size|moe_intermediate_size|num_attention_heads_per_layer|hidden_sizes|downsample_channels|image_size"
    r"|attention_window)$"
)
DROPOUT = re.compile(r"dropout|pdrop|drop_path|layerdrop|jitter|mask_time_prob|mask_feature_prob")
TOKENS = re.compile(r"(token_id|token_ids|token_index|token_indices|_start_id|_end_id|_newline_id|_patch_id)$")
FEATURES = re.compile(r"^(vision_feature_layers?|feature_layer)$")
RATES = re.compile(r"A_log|dt_bias|time_decay|time_first|time_mix|lambda|decay|a_param|alpha_log|inv_freq|slope")
"""Weights that are rates: they keep the values that the model's own code starts with, up to a tenth."""
REMOTE = "transformers_modules"
"""The package that transformers puts code of repositories into."""


class CannotShrinkError(ValueError):
    """No tiny copy of a model can be built."""


def tiny_config(config: Any) -> Any:
    """Return a configuration of the same class for a model of a few thousand weights."""
    if not hasattr(config, "get_text_config"):
        raise CannotShrinkError(f"config must be a configuration of transformers, but got {type(config).__name__}.")
    tiny, text = copy.deepcopy(config), config.get_text_config()
    parts = list(_parts(config, tiny, vars(text)))
    known = {sizes.old_hidden: sizes.hidden for _, _, sizes in reversed(parts) if sizes.old_hidden}
    text_hidden = next((sizes.hidden for old, _, sizes in parts if old is vars(text)), None)
    renumber = _renumbering(min(VOCABULARY, getattr(text, "vocab_size", None) or VOCABULARY))
    for old, new, sizes in parts:
        sizes.known, sizes.text_hidden = known, None if old is vars(text) else text_hidden
        new.update(_shrink(old, sizes, renumber))
        new.pop("quantization_config", None)  # of weights that a tiny copy does not have
        if new.get("_attn_implementation_internal") not in (None, "eager", "sdpa"):  # others are set afterwards
            new["_attn_implementation_internal"] = None
    for part in _configs(tiny):
        _adjust(part)
    for part in _configs(tiny):  # let the configuration's own code check that its values fit together
        for name in ("validate_architecture", "validate_layer_type"):
            try:
                getattr(type(part), name, lambda _: None)(part)
            except Exception as error:
                raise CannotShrinkError(
                    f"{type(tiny).__name__} ({tiny.model_type}) was shrunk, but its own {name} refuses it: {error}"
                ) from error
    return tiny


def special_tokens(config: Any) -> set[int]:
    """Return numbers of tokens that are no text: ends, padding, places of images."""
    numbers: set[int] = set()
    for part in _configs(config):
        for name, value in vars(part).items():
            if TOKENS.search(name):
                numbers.update(x for x in (value if isinstance(value, (list, tuple)) else [value]) if type(x) is int)
    return numbers


def _configs(config: Any) -> Iterator[Any]:
    """Yield the configuration and all configurations in it."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _configs(value)


def _parts(
    config: Any, tiny: Any, around: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], TinySizes]]:
    """Yield old and new attributes of every part, and its sizes; parts without heads take those of the one around."""
    own = vars(config)
    old: dict[str, Any] = (
        {} if _first(own, HEADS) else {name: value for name, value in around.items() if type(value) is int}
    )
    old["ignore_keys_at_rope_validation"] = getattr(config, "ignore_keys_at_rope_validation", None)
    yield own, vars(tiny), TinySizes({**old, **own})
    for name, value in own.items():
        if hasattr(value, "get_text_config"):
            yield from _parts(value, vars(tiny)[name], own)


def _renumbering(vocabulary: int) -> Callable[[Any], Any]:
    """Return a function for numbers of special tokens: large ones become the last of the vocabulary, equal ones equal.

    >>> renumber = _renumbering(100)
    >>> renumber(128000), renumber([128001, 128000]), renumber(2), renumber(None)
    (99, [98, 99], 2, None)
    """
    known: dict[int, int] = {}

    def renumber(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(renumber(x) for x in value)
        if type(value) is not int or value < min(ORDINARY, vocabulary):
            return value
        return known.setdefault(value, vocabulary - 1 - len(known))

    return renumber


def _shrink(old: dict[str, Any], sizes: TinySizes, renumber: Callable[[Any], Any]) -> dict[str, Any]:
    """Return the attributes of one part that change."""
    changed = {name: new for name, new in sizes.changes().items() if name in old}
    layers = kept_layers(old)
    changed.update(with_layers({**old, **changed}, layers))
    if old.get("_heterogeneity_spec") is not None:  # settings of single layers (`per_layer_config`)
        spec = changed["_heterogeneity_spec"] = copy.deepcopy(old["_heterogeneity_spec"])
        overrides = old["_heterogeneity_spec"].per_layer_overrides
        spec.per_layer_overrides = {
            new: {name: sizes.layer_number(name, value) for name, value in overrides[layer].items()}
            for new, layer in enumerate(layers)
            if layer in overrides
        }
    for name, value in old.items():
        if DROPOUT.search(name) and type(value) in (int, float):
            changed[name] = type(value)(0)
        elif FEATURES.search(name):
            changed[name] = _clamp_layer(value)
        elif TOKENS.search(name):
            changed[name] = renumber(value)
    if "rope_parameters" in old:
        changed["rope_parameters"] = tiny_rope(
            old["rope_parameters"], changed.get("head_dim") or sizes.head_dim, sizes.axes
        )
        is_dynamic = any(part.get("rope_type") == "dynamic" for part in _rope_parts(old))
        if is_dynamic and "max_position_embeddings" in old:  # frequencies change where the table of positions ends
            changed["max_position_embeddings"] = SWITCH
    return changed


def _clamp_layer(value: Any) -> Any:
    """Return layers of a vision encoder whose outputs are used: a tiny copy has two."""
    if isinstance(value, (list, tuple)):
        return type(value)(_clamp_layer(x) for x in value)
    return value if type(value) is not int else max(value, -2) if value < 0 else min(value, 1)


def _adjust(config: Any) -> None:
    """Set sizes of families in which they are related in ways that names do not show."""
    match config.model_type:
        case "blt":  # patches have as many features as `cross_attn_k` bytes
            around, inside = config.encoder_config, config.global_config
            inside.hidden_size = around.hidden_size * config.cross_attn_k
            around.hidden_size_global = config.decoder_config.hidden_size_global = inside.hidden_size
            inside.head_dim = inside.hidden_size // inside.num_attention_heads
        case "chameleon_vqgan" | "emu3_vqgan" | "janus_vqgan":  # norms of 32 groups
            config.base_channels = 32
        case "glm5_next_text":  # keys are chosen by groups of `index_kpool`
            config.index_kpool, config.index_topk = 4, 8
        case "hrm_text":  # layers run repeatedly, and are counted as often
            config.num_layers_per_stack = 1
            config.num_hidden_layers = config.H_cycles * (config.L_cycles + 1)
        case "jamba":  # Mamba, Mamba with experts, attention
            config.num_hidden_layers = 3
            config.attn_layer_period, config.attn_layer_offset = 3, 2
            config.expert_layer_period, config.expert_layer_offset = 2, 1
        case "layoutlmv3":  # four corners and two lengths of a box are concatenated
            config.coordinate_size, config.shape_size = config.hidden_size // 8, config.hidden_size // 4
        case "lilt":  # six tables of the layout are concatenated
            config.hidden_size = 48
        case "llama4_vision_model":  # neighbouring patches become one with all of their features
            config.intermediate_size = int(config.hidden_size / config.pixel_shuffle_ratio**2)
            config.vision_output_dim = config.projector_output_dim
        case "molmo2":  # features come from these layers of the vision encoder
            config.adapter_config.vision_feature_layer = [-1, -2]
        case "perceiver":  # latents that all tokens are read into
            config.num_latents, config.d_latents, config.num_self_attends_per_block = 16, config.d_model, 2
        case "reformer":  # positions are pairs of rows of two tables, whose features are concatenated
            config.axial_pos_shape = (8, 16)
            config.axial_pos_embds_dim = (config.hidden_size // 4, config.hidden_size - config.hidden_size // 4)
            config.attn_layers = ["local", "lsh"]
            config.num_hidden_layers = 2
        case "zamba" | "zamba2":  # layers share attention, so there must be one more than there are weights of it
            shared = getattr(config, "num_mem_blocks", 1) + 1
            config.layers_block_type = ["linear_attention"] + ["linear_attention", "hybrid"] * shared
            config.num_hidden_layers = len(config.layers_block_type)
            config.hybrid_layer_ids = [i for i, kind in enumerate(config.layers_block_type) if kind == "hybrid"]


# -- Sizes of one part of a configuration ------------------------------------------------------------------------------


def _first(old: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    return next((old[name] for name in names if type(old.get(name)) is int), None)


class TinySizes:
    """The tiny sizes of one part of a configuration, from its attributes.

    >>> sizes = TinySizes({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8})
    >>> sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
    (64, 4, 2, 16)
    """

    def __init__(self, old: Mapping[str, Any]):
        self.old = old
        self.known: dict[int, int] = {}
        """Old and new features of all parts."""
        self.text_hidden: int | None = None
        """Features of the text's part, where this is another one."""
        heads, kv_heads, dim = _first(old, HEADS), _first(old, KV_HEADS), _first(old, HEAD_DIM)
        hidden = self.old_hidden = _first(old, HIDDEN)
        self.heads = 1 if heads in (None, 1) else 4
        self.kv_heads = self.heads if kv_heads in (None, heads) else min(self.heads, 1 if kv_heads == 1 else 2)
        # Positions have one axis, or more where sections say so, or 3 where a model of images leaves sections out.
        ropes = _rope_parts(old)
        is_known = set(old.get("ignore_keys_at_rope_validation") or ()) & set(SECTIONS)
        lengths = [len(part[name]) for part in ropes for name in SECTIONS if part.get(name)]
        self.axes = max([*lengths, 3 if is_known else 1])
        rotated = min(float(part.get("partial_rotary_factor") or 1.0) for part in (*ropes, old))
        self.head_dim = 16
        while self.head_dim * rotated / 2 < self.axes:
            self.head_dim *= 2
        self.hidden = self.heads * self.head_dim
        if heads and dim and hidden and heads * dim != hidden:  # then they are not equal in the tiny copy, either
            self.hidden = 64
            self.head_dim *= 2 if self.heads * self.head_dim == 64 else 1
        self.old_head_dim = dim or (hidden // heads if heads and hidden else None)

    def changes(self) -> dict[str, Any]:
        """Return all attributes that get another value."""
        changed: dict[str, Any] = {}
        for name, value in self.old.items():
            if type(value) is int:
                changed[name] = self.number(name, value)
            elif value is None and name in ("head_dim", "num_key_value_heads"):  # some models' code needs them
                changed[name] = self.head_dim if name == "head_dim" else self.heads
            elif isinstance(value, (list, tuple)) and all(type(x) is int for x in value) and SIZED_LISTS.search(name):
                single = re.sub(r"_per_layer$|(?<=hidden_size)s$", "", name)
                changed[name] = type(value)(self.number(single, x) for x in value)
        return {**changed, **self._latent(), **self._mamba()}

    def _latent(self) -> dict[str, int]:
        """Return sizes of latent attention, where head_dim is the rotated part of a head, or the whole of it."""
        old, head_dim = self.old, self.old.get("head_dim")
        rope, nope = old.get("qk_rope_head_dim"), old.get("qk_nope_head_dim")
        if type(rope) is not int or type(nope) is not int:
            return {}
        rotated, plain = self.number("qk_rope_head_dim", rope), self.number("qk_nope_head_dim", nope)
        sizes = {"qk_head_dim": rotated + plain}
        sizes["head_dim"] = {rope + nope: rotated + plain, rope: rotated}.get(head_dim, plain)  # type: ignore[arg-type]
        return {name: size for name, size in sizes.items() if type(old.get(name)) is int}

    def _mamba(self) -> dict[str, int]:
        """Return heads of Mamba 2: heads times features are the features inside of the layer."""
        old, expand = self.old, _first(self.old, ("mamba_expand", "expand"))
        for heads, dim in MAMBA_HEADS:
            if type(old.get(heads)) is not int or type(old.get(dim)) is not int:
                continue
            if heads == "num_heads" and ("state_size" not in old or expand is None):
                continue
            if type(old.get("mamba_d_ssm")) is int:
                return {heads: 4, dim: 16, "mamba_d_ssm": 64}
            is_whole = expand is not None and old[heads] * old[dim] == expand * (self.old_hidden or 0)
            return {heads: 4, dim: expand * self.hidden // 4 if is_whole and expand else 16}
        return {}

    def number(self, name: str, value: int) -> int:
        """Return the tiny value of one attribute."""
        old = self.old
        if value <= 0 or KEPT.search(name):
            return value
        if name in HIDDEN:
            return self.hidden
        if name in HEADS or name in KV_HEADS or re.search(r"num_(attention|key_value)_heads$", name):
            if value == _first(old, KV_HEADS):
                return self.kv_heads
            return self.heads if value == _first(old, HEADS) else min(value, 4)
        if name in HEAD_DIM or name == "rotary_dim":  # the share of a head's features that it was
            return max(2 if name == "rotary_dim" else 1, value * self.head_dim // (self.old_head_dim or value))
        if name == "qk_nope_head_dim":  # in its proportion to the part of a head that is rotated
            rotated = old.get("qk_rope_head_dim")
            return (
                8 * value // rotated if type(rotated) is int and rotated and not 8 * value % rotated else min(value, 16)
            )
        if name == "linear_num_value_heads":
            return 4 if value != old.get("linear_num_key_heads") else min(value, 2)
        patch, merged = old.get("patch_size"), old.get("spatial_merge_size")
        if name == "image_size":  # four patches wide
            patch = patch[0] if isinstance(patch, (list, tuple)) and patch else patch
            return 4 * patch if type(patch) is int else min(value, 32)
        if name == "window_size":  # of tokens, or of images: then as wide as two patches that become one
            return 2 * patch * merged if type(patch) is int and type(merged) is int else min(value, 7)
        if name in ("out_hidden_size", "text_hidden_size") and self.text_hidden:
            return self.text_hidden
        for limit, names in LIMITS:
            if names.search(name):
                return min(value, limit)
        return self._width(value) if WIDTHS.search(name) else value

    def _width(self, value: int) -> int:
        """Return a width by its relation to the model's features, or else 32 at most."""
        hidden = self.old_hidden
        if value in self.known:
            return self.known[value]
        if hidden and value % hidden == 0 and value // hidden <= 4:
            return value // hidden * self.hidden
        if hidden and hidden % value == 0 and hidden // value in (2, 4):
            return self.hidden // (hidden // value)
        return min(value, 32)

    def layer_number(self, name: str, value: Any) -> Any:
        """Return the tiny value of a single layer: other windows than the general one stay different."""
        if type(value) is not int:
            return value
        new, general = self.number(name, value), self.old.get(name)
        is_other = type(general) is int and general != value and self.number(name, general) == new
        return new + 4 if is_other and "window" in name else new


# -- Rotary embeddings: as many frequencies as heads have, and lengths at which they change that a test reaches --------


def _rope_parts(old: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the parameters of rotary embeddings, one set or one for each kind of layers."""
    rope = old.get("rope_parameters")
    if not isinstance(rope, dict):
        return []
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def tiny_rope(old: Any, rotated: int, axes: int = 1) -> Any:
    """Return the parameters of rotary embeddings that turn `rotated` features of each head.

    >>> tiny_rope({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}, 16)
    {'rope_type': 'default', 'rope_theta': 10000.0, 'mrope_section': [2, 3, 3]}
    """
    if not isinstance(old, dict):
        return old
    if any(isinstance(part, dict) for part in old.values()):
        return {name: tiny_rope(part, rotated, axes) for name, part in old.items()}
    count = max(int(rotated * (old.get("partial_rotary_factor") or 1.0)) // 2, 1)
    new = dict(old)
    for name in SECTIONS:
        if isinstance(old.get(name), (list, tuple)):
            new[name] = type(old[name])(split(count, old[name]))
    if axes > 1 and not any(old.get(name) for name in SECTIONS):
        new["mrope_section"] = split(count, [1] * axes)
    for name in ("short_factor", "long_factor"):
        if isinstance(old.get(name), (list, tuple)):
            new[name] = [old[name][i * len(old[name]) // count] for i in range(count)]
    if old.get("original_max_position_embeddings"):
        new["original_max_position_embeddings"] = SWITCH
    return new


def split(count: int, like: Any) -> list[int]:
    """Split `count` into parts of about the proportions of `like`, none of them empty.

    >>> split(8, [16, 24, 24]), split(4, [11, 11, 10])
    ([2, 3, 3], [2, 1, 1])
    """
    parts = [max(1, count * x // sum(like)) for x in like]
    while sum(parts) != count:
        gaps = [count * x / sum(like) - part for x, part in zip(like, parts, strict=True)]
        if sum(parts) < count:
            parts[gaps.index(max(gaps))] += 1
        else:
            parts[max(range(len(parts)), key=lambda i: (parts[i] > 1, -gaps[i]))] -= 1
    return parts


# -- Layers of the tiny copy: one of every kind, in their order --------------------------------------------------------
# The kind of a layer follows from lists with an entry per layer (`layer_types`), lists of layers (`mlp_only_layers`),
# from how many layers are of a kind at the start (`first_k_dense_replace`) or at the end (`num_kv_shared_layers`), and
# from settings of single layers (`per_layer_config`).


NUM_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "num_blocks", "encoder_layers",
    "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack",
)  # fmt: skip
AT_START = ("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers")
"""How many layers at the start are of one kind."""
INDICES = re.compile(r"layers|layer_ids|layer_indices|idxs|indexes|indices")
"""Names of lists of numbers of layers."""
PERIODS = re.compile(
    r"(layer_period|_interval|every_n_layers|sparse_step|layer_step|layer_freq|window_pattern|_frequency|group_size)$"
)
MOST = 8
"""Up to so many kinds of layers every combination of traits is kept; beyond, every trait is kept once."""


def num_layers(old: Mapping[str, Any]) -> int | None:
    count = next((old[name] for name in NUM_LAYERS if isinstance(old.get(name), int)), None)
    lists = [old[name] for name in ("layers_block_type", "layer_types") if isinstance(old.get(name), list)]
    return len(lists[0]) if count is None and lists else count


def _traits(name: str, value: Any, count: int) -> tuple[list[Any], Callable[[list[Any]], Any]] | None:
    """Return what an attribute says of each layer, and a function from that of the kept layers to its new value."""
    layers = range(count)
    if isinstance(value, (list, tuple)):
        kind = type(value)
        is_rising = all(type(x) is int and 0 <= x < count for x in value) and all(
            a < b for a, b in itertools.pairwise(value)
        )
        if INDICES.search(name) and is_rising:
            return [i in value for i in layers], lambda kept: kind(i for i, is_in in enumerate(kept) if is_in)
        return (list(value), kind) if len(value) == count > 1 else None
    if not isinstance(value, int):
        return None
    if name in AT_START:
        return [i < value for i in layers], sum
    if name == "moe_layer_end_index":  # the last layer of a kind
        return [i <= value % count for i in layers], lambda kept: sum(kept) - 1
    return ([i >= count - value for i in layers], sum) if name == "num_kv_shared_layers" else None


def kept_layers(old: Mapping[str, Any]) -> list[int]:
    """Return the layers that the tiny copy keeps.

    >>> kept_layers({"num_hidden_layers": 6, "layer_types": ["near"] * 5 + ["far"], "first_k_dense_replace": 1})
    [0, 1, 5]
    >>> kept_layers({"num_hidden_layers": 6})
    [0, 1]
    """
    count = num_layers(old)
    if count is None:
        return []
    traits: list[list[Any]] = [[] for _ in range(count)]
    is_named = isinstance(old.get("layer_types"), (list, tuple))
    for name, value in old.items():
        by_layer = _traits(name, value, count)
        if by_layer is not None and not (name == "max_window_layers" and is_named):  # layer_types has it already
            for layer, trait in enumerate(by_layer[0]):
                traits[layer].append((name, repr(trait)))
    spec = old.get("_heterogeneity_spec")
    if spec is not None:
        for layer in range(count):
            traits[layer].append(("per_layer_config", repr(sorted(spec.per_layer_overrides.get(layer, {}).items()))))
    kinds: dict[Any, int] = {}
    for layer, own in enumerate(traits):
        kinds.setdefault(tuple(own), layer)
    kept = sorted(kinds.values())
    if len(kept) > MOST:  # the first layers that together have every trait
        kept, seen = [], set()
        for layer, own in enumerate(traits):
            if not seen.issuperset(own):
                kept.append(layer)
                seen.update(own)
    repeated = (old.get(name) for name in ("block_types", "hybrid_override_pattern"))
    least = max([2, *(len(pattern) for pattern in repeated if isinstance(pattern, list))])
    for name, value in old.items():
        if PERIODS.search(name) and type(value) is int and value > 1:  # of a kind that no list names
            is_expert = re.search(r"moe|sparse|expert|mlp", name)
            lists = ("mlp_layer_types", "moe_layers") if is_expert else ("layer_types", "layers_block_type")
            if not any(isinstance(old.get(other), (list, tuple)) for other in lists):
                least = max(least, 4)
    others = [layer for layer in range(count) if layer not in kept]
    return sorted([*kept, *others[: max(0, least - len(kept))]])


def with_layers(old: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return the attributes that change when these layers are kept.

    >>> config = {"num_hidden_layers": 6, "layer_types": list("aaaaab"), "mlp_only_layers": [0, 5]}
    >>> with_layers(config, [0, 1, 5])
    {'num_hidden_layers': 3, 'layer_types': ['a', 'a', 'b'], 'mlp_only_layers': [0, 2]}
    """
    count = num_layers(old)
    changed: dict[str, Any] = {}
    for name, value in old.items() if count is not None else ():
        assert count is not None
        traits = _traits(name, value, count)
        if name in NUM_LAYERS and isinstance(value, int):
            changed[name] = len(kept) if value == count else min(value, 2)
        elif traits is not None:
            changed[name] = traits[1]([traits[0][layer] for layer in kept])
        elif PERIODS.search(name) and isinstance(value, int):
            changed[name] = min(value, 2)
    return changed


# -- A model with weights that show what it does: none of them zero, none of them one, the same for the same seed ------


def build(kind: type, config: Any, seed: int = 0) -> nn.Module:
    """Return the model in float64 on the CPU, in train mode, with weights from a generator of its own."""
    with _isolated_random(seed):
        config, wanted = copy.deepcopy(config), getattr(kind, "config_class", None)  # models write to theirs
        text = config.get_text_config()
        if isinstance(wanted, type) and not isinstance(config, wanted) and isinstance(text, wanted):
            config = text
        config._experts_implementation = "eager"  # the others have no float64
        try:
            model = kind._from_config(config, dtype=torch.float64)
        except Exception as error:
            remote = " (code of its own repository, trust_remote_code)" if kind.__module__.startswith(REMOTE) else ""
            raise CannotShrinkError(
                f"a tiny copy of {getattr(config, 'model_type', '')!r} was configured, but {kind.__name__}{remote}"
                f" could not be built from it: {type(error).__name__}: {error}"
            ) from error
        model = model.to("cpu", torch.float64).train()
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                noise = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
                weight.copy_(_random_weight(name, weight, noise))
    return model


@contextmanager
def _isolated_random(seed: int) -> Iterator[None]:
    """Seed the generators of PyTorch, NumPy and Python inside, and restore them afterwards."""
    before = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(before[0])
            np.random.set_state(before[1])


def _random_weight(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    """Return new values of a parameter from noise in [-1, 1]: norms near their start, matrices that keep magnitudes."""
    is_usual = bool(torch.isfinite(weight).all()) and weight.numel() > 0 and weight.abs().max() < 100
    if RATES.search(name) and is_usual:
        return weight + 0.1 * noise
    if is_usual and weight.ndim and bool((weight == 1).all()):
        return 1 + 0.2 * noise
    if weight.ndim < 2:
        return 0.2 * noise
    fan_in = weight[0].numel() if weight.ndim != 3 else max(weight.shape[1:])
    return noise * (3.0 / min(max(fan_in, 1), 64)) ** 0.5
