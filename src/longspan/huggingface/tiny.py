"""A tiny copy of a model's configuration, and a model made from it: the same code, computed in a moment on a CPU.

    tiny = tiny_config(config)         # of the same class: a layer of every kind, small sizes, no dropout
    model = build(LlamaForCausalLM, tiny)

What decides *what* is computed (activations, soft caps, scales, biases, rotary embeddings, tied weights) stays. What
decides *how much* becomes small, by the names of attributes and by how their values are related, so that families that
nobody has heard of work too; `tiny_exceptions` has those where names and relations do not tell.
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

# Rotary embeddings of a tiny copy: as many frequencies as its heads have, and lengths at which they change that a test
# reaches.


SWITCH = 24
"""Where rotary embeddings change that know short and long sequences: beyond a rank's tokens, within a test's."""
SECTIONS = ("mrope_section", "xdrope_section")
FACTORS = ("short_factor", "long_factor")


def axes_of(given: Mapping[str, Any]) -> int:
    """How many axes positions have: 1, or more where sections say so, or 3 where a model of images leaves them out."""
    found = [len(part[name]) for part in rope_parts(given) for name in SECTIONS if part.get(name)]
    known = set(given.get("ignore_keys_at_rope_validation") or ()) & set(SECTIONS)
    return max([*found, 3 if known else 1])


def rope_parts(given: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parameters of rotary embeddings, one set or one for each kind of layers."""
    rope = given.get("rope_parameters")
    if not isinstance(rope, dict):
        return []
    return [part for part in rope.values() if isinstance(part, dict)] or [rope]


def tiny_rope(given: Any, rotated: int, axes: int = 1) -> Any:
    """The parameters of rotary embeddings that turn `rotated` features of each head.

    >>> tiny_rope({"rope_type": "default", "rope_theta": 1e4, "mrope_section": [16, 24, 24]}, 16)
    {'rope_type': 'default', 'rope_theta': 10000.0, 'mrope_section': [2, 3, 3]}
    """
    if not isinstance(given, dict):
        return given
    if any(isinstance(part, dict) for part in given.values()):
        return {name: tiny_rope(part, rotated, axes) for name, part in given.items()}
    share = given.get("partial_rotary_factor") or 1.0
    count = max(int(rotated * share) // 2, 1)
    made = dict(given)
    for name in SECTIONS:
        if isinstance(given.get(name), (list, tuple)):
            made[name] = type(given[name])(split(count, given[name]))
    if axes > 1 and not any(given.get(name) for name in SECTIONS):
        made["mrope_section"] = split(count, [1] * axes)
    for name in FACTORS:
        if isinstance(given.get(name), (list, tuple)):
            made[name] = [given[name][i * len(given[name]) // count] for i in range(count)]
    if given.get("original_max_position_embeddings"):
        made["original_max_position_embeddings"] = SWITCH
    return made


def split(count: int, like: Any) -> list[int]:
    """`count` in parts of about the proportions of `like`, none of them empty.

    >>> split(8, [16, 24, 24]), split(4, [11, 11, 10])
    ([2, 3, 3], [2, 1, 1])
    """
    whole = sum(like)
    parts = [max(1, count * x // whole) for x in like]
    while sum(parts) != count:
        gaps = [count * x / whole - part for x, part in zip(like, parts, strict=True)]
        if sum(parts) < count:
            parts[gaps.index(max(gaps))] += 1
        else:
            largest = max(range(len(parts)), key=lambda i: (parts[i] > 1, -gaps[i]))
            parts[largest] -= 1
    return parts


def moves_by_table(given: Mapping[str, Any]) -> bool:
    """Whether frequencies change where the table of positions ends (`dynamic`)."""
    return any(part.get("rope_type") == "dynamic" for part in rope_parts(given))


# Families whose sizes are related in ways that names do not tell: what is set after the rules.


def jamba(config: Any) -> None:
    """Mamba, Mamba with experts, attention."""
    config.num_hidden_layers = 3
    config.attn_layer_period, config.attn_layer_offset = 3, 2
    config.expert_layer_period, config.expert_layer_offset = 2, 1


def zamba(config: Any) -> None:
    """Attention is shared by several layers, so that there must be one more than there are weights of it."""
    shared = getattr(config, "num_mem_blocks", 1) + 1
    config.layers_block_type = ["linear_attention"] + ["linear_attention", "hybrid"] * shared
    config.num_hidden_layers = len(config.layers_block_type)
    config.hybrid_layer_ids = [i for i, kind in enumerate(config.layers_block_type) if kind == "hybrid"]


def longformer(config: Any) -> None:
    """Half of the window is on each side."""
    config.attention_window = [8] * config.num_hidden_layers


def reformer(config: Any) -> None:
    """Positions are pairs of rows of two tables, whose features follow each other."""
    config.axial_pos_shape = (8, 16)
    config.axial_pos_embds_dim = (config.hidden_size // 4, config.hidden_size - config.hidden_size // 4)
    config.attn_layers = ["local", "lsh"]
    config.num_hidden_layers = 2


def lilt(config: Any) -> None:
    """Six tables of the layout follow each other."""
    config.hidden_size = 48


def layoutlmv3(config: Any) -> None:
    """Four corners and two lengths of a box follow each other."""
    config.coordinate_size, config.shape_size = config.hidden_size // 8, config.hidden_size // 4


def molmo2(config: Any) -> None:
    """Features are taken from these layers of the images' part."""
    config.adapter_config.vision_feature_layer = [-1, -2]


def vq(config: Any) -> None:
    """Norms of 32 groups."""
    config.base_channels = 32


def glm5_next(config: Any) -> None:
    """Keys are chosen by groups of `index_kpool`."""
    config.index_kpool, config.index_topk = 4, 8


def perceiver(config: Any) -> None:
    """Latents that all tokens are read into."""
    config.num_latents, config.d_latents, config.num_self_attends_per_block = 16, config.d_model, 2


def hrm_text(config: Any) -> None:
    """Layers are gone through again and again, and counted as often."""
    config.num_layers_per_stack = 1
    config.num_hidden_layers = config.H_cycles * (config.L_cycles + 1)


def blt(config: Any) -> None:
    """Patches have as many features as `cross_attn_k` bytes."""
    around, inside = config.encoder_config, config.global_config
    inside.hidden_size = around.hidden_size_global = config.decoder_config.hidden_size_global = (
        around.hidden_size * config.cross_attn_k
    )
    inside.head_dim = inside.hidden_size // inside.num_attention_heads


def llama4_vision(config: Any) -> None:
    """Neighbouring patches become one with all of their features."""
    config.intermediate_size = int(config.hidden_size / config.pixel_shuffle_ratio**2)
    config.vision_output_dim = config.projector_output_dim


EXCEPTIONS: dict[str, Callable[[Any], None]] = {
    "blt": blt,
    "chameleon_vqgan": vq,
    "emu3_vqgan": vq,
    "glm5_next_text": glm5_next,
    "hrm_text": hrm_text,
    "jamba": jamba,
    "janus_vqgan": vq,
    "layoutlmv3": layoutlmv3,
    "lilt": lilt,
    "llama4_vision_model": llama4_vision,
    "longformer": longformer,
    "molmo2": molmo2,
    "perceiver": perceiver,
    "reformer": reformer,
    "zamba": zamba,
    "zamba2": zamba,
}


# Small sizes for one part of a configuration, by the names of its attributes and by how their values are related.
# Heads keep their ratio, features are heads times features per head where they were, and a size that was equal to
# another one still is.


VOCABULARY = 128
POSITIONS = 128
"""Rows of tables of positions, and the largest that rotary embeddings count on."""
WINDOW, CHUNK, TEMPERATURE = 7, 8, 5

HIDDEN = ("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embed_dim", "embedding_dim")
HEADS = (
    "num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads", "encoder_attention_heads",
    "decoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads",
)  # fmt: skip
KV_HEADS = ("num_key_value_heads", "num_kv_heads", "kv_n_heads", "multi_query_group_num", "num_query_groups")
HEAD_DIM = ("head_dim", "kv_channels", "d_kv", "d_head", "attention_head_size", "dim_head", "attention_head_dim")


def first(given: Mapping[str, Any], names: tuple[str, ...]) -> int | None:
    """The first of these attributes that is a number."""
    return next((given[name] for name in names if type(given.get(name)) is int), None)


def heads_of(given: Mapping[str, Any]) -> tuple[int, int]:
    """Heads of queries and of keys, with the kind of ratio that the model has.

    >>> heads_of({"num_attention_heads": 32, "num_key_value_heads": 8}), heads_of({"n_head": 71, "num_kv_heads": 1})
    ((4, 2), (4, 1))
    """
    heads, kv = first(given, HEADS) or 1, first(given, KV_HEADS)
    if heads == 1:
        return 1, 1
    if kv is None or kv == heads:
        return 4, 4
    return 4, 1 if kv == 1 else 2


def features_per_head(given: Mapping[str, Any]) -> int:
    """16, or as many as the parts of a rotary embedding of several axes need."""
    shares = [part.get("partial_rotary_factor") for part in rope_parts(given)] + [given.get("partial_rotary_factor")]
    share = min(float(share or 1.0) for share in shares)
    size = 16
    while size * share / 2 < axes_of(given):
        size *= 2
    return size


class TinySizes:
    """The tiny values of one part's attributes.

    >>> sizes = TinySizes({"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8})
    >>> sizes.hidden, sizes.heads, sizes.kv_heads, sizes.head_dim
    (64, 4, 2, 16)
    """

    def __init__(self, given: Mapping[str, Any]):
        self.given = given
        self.axes = axes_of(given)
        self.elsewhere: dict[int, int] = {}
        self.text: int | None = None
        """Features of the text's part, where this is another one."""
        self.hidden_then = first(given, HIDDEN)
        self.heads, self.kv_heads = heads_of(given)
        self.head_dim = features_per_head(given)
        heads_then, dim_then = first(given, HEADS), first(given, HEAD_DIM)
        self.together = not (heads_then and dim_then and self.hidden_then and heads_then * dim_then != self.hidden_then)
        self.hidden = self.heads * self.head_dim if self.together else 64
        if not self.together and self.heads * self.head_dim == self.hidden:
            self.head_dim = 2 * self.head_dim
        self.head_dim_then = dim_then or (self.hidden_then // heads_then if heads_then and self.hidden_then else None)

    def changed(self) -> dict[str, Any]:
        """All attributes that get another value."""
        found: dict[str, Any] = {**self._missing()}
        for name, value in self.given.items():
            if type(value) is int:
                new = self.number(name, value)
                if new != value:
                    found[name] = new
            elif (
                isinstance(value, (list, tuple))
                and value
                and all(type(x) is int for x in value)
                and SIZED_LISTS.search(name)
            ):
                found[name] = type(value)(self.number(SINGLE.sub("", name), x) for x in value)
        return {**found, **self._latent(), **self._scans()}

    def _missing(self) -> dict[str, int]:
        """What is left out and means as many as heads ask for: not every model's code can do without."""
        made = {"head_dim": self.head_dim, "num_key_value_heads": self.heads}
        return {name: value for name, value in made.items() if name in self.given and self.given[name] is None}

    def _latent(self) -> dict[str, int]:
        """Latent attention calls the part of a head that is rotated, or the whole of it, head_dim."""
        given, then = self.given, self.given.get("head_dim")
        rope, nope = given.get("qk_rope_head_dim"), given.get("qk_nope_head_dim")
        if type(rope) is not int or type(nope) is not int:
            return {}
        rotated, plain = self.number("qk_rope_head_dim", rope), self.number("qk_nope_head_dim", nope)
        made = {"qk_head_dim": rotated + plain}
        if type(then) is int:
            made["head_dim"] = rotated if then == rope else rotated + plain if then == rope + nope else plain
        return {name: value for name, value in made.items() if type(given.get(name)) is int}

    def _scans(self) -> dict[str, int]:
        """Heads of Mamba 2: heads times features are the features inside of the layer."""
        given = self.given
        expand = next((given[name] for name in ("mamba_expand", "expand") if type(given.get(name)) is int), None)
        for heads, dim in MAMBA_HEADS:
            if type(given.get(heads)) is not int or type(given.get(dim)) is not int:
                continue
            if heads == "num_heads" and ("state_size" not in given or expand is None):
                continue
            inner = given.get("mamba_d_ssm")
            if type(inner) is int:
                return {heads: 4, dim: 16, "mamba_d_ssm": 64}
            whole = expand is not None and given[heads] * given[dim] == expand * (self.hidden_then or 0)
            return {heads: 4, dim: expand * self.hidden // 4 if whole and expand else 16}
        return {}

    def number(self, name: str, value: int) -> int:
        """The tiny value of one attribute."""
        if value <= 0 or name in KEPT or KEPT_NAMES.search(name):
            return value
        for names, rule in RULES:
            if name in names if isinstance(names, tuple) else names.search(name):
                return rule(self, value)
        return value

    def own_number(self, name: str, value: Any) -> Any:
        """The tiny value that a single layer has: another one than all, where it was another one."""
        if type(value) is not int:
            return value
        new, general = self.number(name, value), self.given.get(name)
        is_other = type(general) is int and general != value and self.number(name, general) == new
        return new + 4 if is_other and "window" in name else new

    def related(self, value: int) -> int:
        """A size by its relation to the model's features, or else 32 at most."""
        then = self.hidden_then
        if value in self.elsewhere:
            return self.elsewhere[value]
        if then and value % then == 0 and value // then <= 4:
            return value // then * self.hidden
        if then and then % value == 0 and then // value in (2, 4):
            return self.hidden // (then // value)
        return min(value, 32)

    def per_head(self, value: int) -> int:
        """As large beside the features of a head as it was."""
        then = self.head_dim_then or value
        return max(1, value * self.head_dim // then)

    def beside_rotated(self, value: int) -> int:
        """The part of a head that is not rotated, in its proportion to the one that is."""
        rotated = self.given.get("qk_rope_head_dim")
        return 8 * value // rotated if type(rotated) is int and rotated and 8 * value % rotated == 0 else min(value, 16)

    def image(self, value: int) -> int:
        """Four patches wide."""
        patch = self.given.get("patch_size")
        patch = patch[0] if isinstance(patch, (list, tuple)) and patch else patch
        return 4 * patch if type(patch) is int else min(value, 32)

    def window(self, value: int) -> int:
        """Of tokens, or of images: then as wide as two patches that become one."""
        patch, merged = self.given.get("patch_size"), self.given.get("spatial_merge_size")
        return 2 * patch * merged if type(patch) is int and type(merged) is int else min(value, WINDOW)

    def heads_like(self, value: int) -> int:
        then, kv_then = first(self.given, HEADS), first(self.given, KV_HEADS)
        if value == kv_then:
            return self.kv_heads
        return self.heads if value == then else min(value, 4)


MAMBA_HEADS = (
    ("mamba_n_heads", "mamba_d_head"), ("mamba_num_heads", "mamba_head_dim"), ("n_mamba_heads", "mamba_headdim"),
    ("num_heads", "head_dim"),
)  # fmt: skip
SIZED_LISTS = re.compile(
    r"^(intermediate_size|moe_intermediate_size|num_attention_heads_per_layer)$|^(hidden_sizes|downsample_channels|image_size)$"
)
SINGLE = re.compile(r"_per_layer$|(?<=hidden_size)s$")
KEPT = frozenset({
    "chunk_size_feed_forward", "num_labels", "patch_size", "temporal_patch_size", "spatial_merge_size", "num_channels",
    "in_channels", "pretraining_tp", "query_pre_attn_scalar", "tokens_per_second", "audio_channels", "codebook_size",
})  # fmt: skip
"""What is computed, not how large it is."""
KEPT_NAMES = re.compile(r"kernel|stride|_token_id$|_token_index$|_alpha_factor$|_beta_factor$|temperature|_merge_size$")


def _name(pattern: str) -> re.Pattern[str]:
    return re.compile(pattern)


def _at_most(limit: int) -> Callable[[TinySizes, int], int]:
    return lambda _, value: min(value, limit)


RULES: tuple[tuple[tuple[str, ...] | re.Pattern[str], Callable[[TinySizes, int], int]], ...] = (
    (_name(r"vocab_size|num_embeddings$|_vocab$"), _at_most(VOCABULARY)),
    (("original_max_position_embeddings",), _at_most(SWITCH)),
    (
        _name(r"^(n_positions|n_ctx|max_seq_len|context_length|seq_length|model_max_length|max_target_positions)$"
              r"|max_position_embeddings$|max_sequence_length|max_source_positions"),
        _at_most(POSITIONS),
    ),
    # images
    (("image_size",), lambda sizes, value: sizes.image(value)),
    (_name(r"^(out_hidden_size|text_hidden_size)$"), lambda sizes, value: sizes.text or sizes.related(value)),
    (_name(r"^mm_tokens_per_image$"), _at_most(4)),
    (_name(r"^local_attention$"), _at_most(8)),
    (("window_size",), lambda sizes, value: sizes.window(value)),
    (_name(r"sliding_window(_size)?$|^attention_window(_size)?$|^local_window"), _at_most(WINDOW)),
    (_name(r"^floor_scale$"), _at_most(TEMPERATURE)),
    (_name(r"chunk_size$|chunk_length$|^block_size$"), _at_most(CHUNK)),
    # heads
    (HIDDEN, lambda sizes, _: sizes.hidden),
    (KV_HEADS, lambda sizes, value: sizes.heads_like(value)),
    (HEADS, lambda sizes, value: sizes.heads_like(value)),
    (HEAD_DIM, lambda sizes, value: sizes.per_head(value)),
    (("rotary_dim",), lambda sizes, value: max(2, sizes.per_head(value))),
    (_name(r"num_attention_heads$"), lambda sizes, value: sizes.heads_like(value)),
    (_name(r"num_key_value_heads$"), lambda sizes, value: sizes.heads_like(value)),
    # experts
    (_name(r"^(num_experts|num_local_experts|n_routed_experts|moe_num_experts|num_moe_experts)$"), _at_most(4)),
    (_name(r"^(num_experts_per_tok(en)?|moe_topk|moe_k|moe_top_k|top_k_experts|moe_topk)$"), _at_most(2)),
    (_name(r"^(n_group|num_expert_group)$"), _at_most(2)),
    (_name(r"^topk_group$"), _at_most(1)),
    (_name(r"shared_experts$|^zero_expert_num$"), _at_most(2)),
    (_name(r"^num_nextn_predict_layers$|^num_mtp_modules$|mtp_num_hidden_layers"), _at_most(1)),
    # latent attention
    (_name(r"^kv_lora_rank$|^o_lora_rank$"), _at_most(16)),
    (_name(r"^q_lora_rank$"), _at_most(24)),
    (_name(r"^qk_rope_head_dim$"), _at_most(8)),
    (("qk_nope_head_dim",), lambda sizes, value: sizes.beside_rotated(value)),
    (("v_head_dim",), _at_most(16)),
    (_name(r"^index_head_dim$"), _at_most(16)),
    (_name(r"^index_n_heads$"), _at_most(2)),
    (_name(r"^index_topk"), _at_most(8)),
    # recurrences
    (_name(r"^linear_num_key_heads$"), _at_most(2)),
    (
        _name(r"^linear_num_value_heads$"),
        lambda sizes, value: 4 if value != sizes.given.get("linear_num_key_heads") else min(value, 2),
    ),
    (_name(r"^linear_(key_|value_)?head_dim$"), _at_most(16)),
    (_name(r"^linear_num_heads$"), _at_most(4)),
    (_name(r"state_size$|d_state$"), _at_most(8)),
    (_name(r"n_?groups$|^n_groups$"), _at_most(2)),
    (_name(r"dt_rank$|time_step_rank$"), _at_most(4)),
    # features
    (
        _name(r"intermediate|ffn_dim|ffn_hidden_size|^d_ff$|^n_inner$|^dim_ff$|^dff$|^mlp_dim$|^hidden_dim$|^d_inner$"
              r"|feed_forward_size|expert_dim"),
        _at_most(48),
    ),
    (_name(r"per_layer_input$"), _at_most(16)),
    (_name(r"(_size|_dim|_rank|_width|_channels|_features)$"), lambda sizes, value: sizes.related(value)),
)  # fmt: skip
"""Names and what becomes of their values; the first that fits counts."""


# -- Which layers of a model its tiny copy has: one of every kind, in their order --------------------------------------
# What a layer is follows from lists with an entry per layer (`layer_types`), lists of layers (`mlp_only_layers`), from
# how many layers are of a kind at the start (`first_k_dense_replace`) or at the end (`num_kv_shared_layers`), and from
# settings of single layers (`per_layer_config`).


NUM_LAYERS = (
    "num_hidden_layers", "n_layer", "n_layers", "num_layers", "layers", "depth", "num_blocks", "encoder_layers",
    "decoder_layers", "num_decoder_layers", "num_encoder_layers", "num_layers_per_stack",
)  # fmt: skip
AT_START = (
    "first_k_dense_replace", "num_dense_layers", "moe_layer_start_index", "max_window_layers",
)  # fmt: skip
"""How many layers at the start are of one kind."""
LAST = ("moe_layer_end_index",)
"""The last layer of a kind."""
AT_END = ("num_kv_shared_layers",)
INDICES = re.compile(r"layers|layer_ids|layer_indices|idxs|indexes|indices")
"""Names of lists of numbers of layers."""
PERIODS = re.compile(
    r"(layer_period|_interval|every_n_layers|sparse_step|layer_step|layer_freq|window_pattern|_frequency|group_size)$"
)
EXPERTS = re.compile(r"moe|sparse|expert|mlp")
PATTERNS = ("block_types", "hybrid_override_pattern")
"""Lists that are repeated over the layers."""
MOST = 8
"""Kinds of layers that are told apart by all that is said of them; beyond, everything said is there once."""


def num_layers(given: Mapping[str, Any]) -> tuple[str, int] | None:
    """The name of the attribute that counts layers, and how many there are."""
    for name in NUM_LAYERS:
        if isinstance(given.get(name), int):
            return name, given[name]
    for name in ("layers_block_type", "layer_types"):
        if isinstance(given.get(name), list):
            return name, len(given[name])
    return None


def kept_layers(given: Mapping[str, Any]) -> list[int]:
    """The layers that the tiny copy keeps.

    >>> kept_layers({"num_hidden_layers": 6, "layer_types": ["near"] * 5 + ["far"], "first_k_dense_replace": 1})
    [0, 1, 5]
    >>> kept_layers({"num_hidden_layers": 6})
    [0, 1]
    """
    found = num_layers(given)
    if found is None:
        return []
    _, count = found
    said = [_said(given, count, layer) for layer in range(count)]
    kinds: dict[Any, int] = {}
    for layer, words in enumerate(said):
        kinds.setdefault(tuple(words), layer)
    kept = sorted(kinds.values())
    if len(kept) > MOST:
        kept = _covering(said)
    least = max([2, *(len(given[name]) for name in PATTERNS if isinstance(given.get(name), list))])
    if any(_counts_on(name, value, given) for name, value in given.items()):
        least = max(least, 4)
    for layer in range(count):
        if len(kept) >= least:
            break
        if layer not in kept:
            kept = sorted([*kept, layer])
    return kept


def _counts_on(name: str, value: Any, given: Mapping[str, Any]) -> bool:
    """Whether every so many layers are of a kind that no list names."""
    if not PERIODS.search(name) or type(value) is not int or value < 2:
        return False
    lists = ("mlp_layer_types", "moe_layers") if EXPERTS.search(name) else ("layer_types", "layers_block_type")
    return not any(isinstance(given.get(other), (list, tuple)) for other in lists)


def _covering(said: Sequence[Sequence[Any]]) -> list[int]:
    """The first layers that together have everything that is said of any layer."""
    seen: set[Any] = set()
    kept = []
    for layer, words in enumerate(said):
        if not seen.issuperset(words):
            kept.append(layer)
            seen.update(words)
    return kept


def _said(given: Mapping[str, Any], count: int, layer: int) -> list[Any]:
    """What the configuration says of a layer, in a form that can be compared."""
    words: list[Any] = []
    is_named = isinstance(given.get("layer_types"), (list, tuple))
    for name, value in given.items():
        if name == "max_window_layers" and is_named:  # said there already, if it is used at all
            continue
        if is_index_list(name, value, count):
            words.append((name, layer in value))
        elif is_per_layer(value, count):
            words.append((name, repr(value[layer])))
        elif name in AT_START and isinstance(value, int):
            words.append((name, layer < value))
        elif name in LAST and isinstance(value, int):
            words.append((name, layer <= value % count))
        elif name in AT_END and isinstance(value, int):
            words.append((name, layer >= count - value))
    spec = given.get("_heterogeneity_spec")
    if spec is not None:
        words.append(("per_layer_config", repr(sorted(spec.per_layer_overrides.get(layer, {}).items()))))
    return words


def is_per_layer(value: Any, count: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == count and count > 1


def is_index_list(name: str, value: Any, count: int) -> bool:
    """Rising numbers of layers, under a name that says so."""
    if not isinstance(value, (list, tuple)) or not INDICES.search(name):
        return False
    if not all(type(x) is int and 0 <= x < count for x in value):
        return False
    return all(a < b for a, b in itertools.pairwise(value))


def with_layers(given: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """The attributes that change when these layers are kept.

    >>> config = {"num_hidden_layers": 6, "layer_types": list("aaaaab"), "mlp_only_layers": [0, 5]}
    >>> with_layers(config, [0, 1, 5])
    {'num_hidden_layers': 3, 'layer_types': ['a', 'a', 'b'], 'mlp_only_layers': [0, 2]}
    """
    found = num_layers(given)
    if found is None:
        return {}
    _, count = found
    changed: dict[str, Any] = {}
    for name, value in given.items():
        if name in NUM_LAYERS and isinstance(value, int):
            changed[name] = len(kept) if value == count else min(value, 2)
        elif is_index_list(name, value, count):
            changed[name] = type(value)(new for new, old in enumerate(kept) if old in value)
        elif is_per_layer(value, count):
            changed[name] = type(value)(value[layer] for layer in kept)
        elif name in AT_START and isinstance(value, int):
            changed[name] = sum(layer < value for layer in kept)
        elif name in LAST and isinstance(value, int):
            changed[name] = sum(layer <= value % count for layer in kept) - 1
        elif name in AT_END and isinstance(value, int):
            changed[name] = sum(layer >= count - value for layer in kept)
        elif PERIODS.search(name) and isinstance(value, int):
            changed[name] = min(value, 2)
    return changed


# A model with weights that show what it does: none of them zero, none of them one, the same for the same seed.


AS_STARTED = re.compile(r"A_log|dt_bias|time_decay|time_first|time_mix|lambda|decay|a_param|alpha_log|inv_freq|slope")
"""Weights that are rates: they keep the values that the model's own code starts with, up to a tenth."""

REMOTE = "transformers_modules"
"""The package that transformers puts code of repositories into."""


class CannotShrinkError(ValueError):
    """No tiny copy of a model can be made."""


def build(kind: type, config: Any, seed: int = 0) -> nn.Module:
    """The model in float64 on the CPU, in train mode, its weights drawn from a generator of its own."""
    with own_randomness(seed):
        config = copy.deepcopy(config)  # models write to theirs
        config = fitting(kind, config)
        config._experts_implementation = "eager"  # the others have no float64
        try:
            model = kind._from_config(config, dtype=torch.float64)
        except Exception as error:
            remote = " (code of its own repository, trust_remote_code)" if kind.__module__.startswith(REMOTE) else ""
            raise CannotShrinkError(
                f"a tiny copy of {getattr(config, 'model_type', '')!r} was configured, but {kind.__name__}{remote}"
                f" could not be made from it: {type(error).__name__}: {error}"
            ) from error
        model = model.to("cpu", torch.float64).train()
        draw(model, torch.Generator().manual_seed(seed))
    return model


def fitting(kind: type, config: Any) -> Any:
    """The part of a configuration that a model is made from: all, or the text's."""
    wanted = getattr(kind, "config_class", None)
    text = config.get_text_config()
    return text if isinstance(wanted, type) and not isinstance(config, wanted) and isinstance(text, wanted) else config


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """What is drawn inside changes nothing outside: PyTorch's, NumPy's and Python's generators."""
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


@torch.no_grad()
def draw(model: nn.Module, generator: torch.Generator) -> None:
    """Draws every parameter anew. Norms are around what they start at, matrices keep the size of what goes through."""
    for name, weight in model.named_parameters():
        noise = torch.rand(weight.shape, generator=generator, dtype=torch.float64) * 2 - 1
        weight.copy_(drawn(name, weight, noise))


def drawn(name: str, weight: Tensor, noise: Tensor) -> Tensor:
    """New values of one parameter from noise between -1 and 1."""
    usual = bool(torch.isfinite(weight).all()) and weight.numel() > 0 and weight.abs().max() < 100
    if AS_STARTED.search(name) and usual:
        return weight + 0.1 * noise
    if usual and weight.ndim and bool((weight == 1).all()):
        return 1 + 0.2 * noise
    if weight.ndim < 2:
        return 0.2 * noise
    fan_in = weight[0].numel() if weight.ndim != 3 else max(weight.shape[1:])
    return noise * (3.0 / min(max(fan_in, 1), 64)) ** 0.5


# -- The tiny configuration and its model ------------------------------------------------------------------------------


__all__ = ["CannotShrinkError", "build", "special_tokens", "tiny_config"]

DROPOUT = re.compile(r"dropout|pdrop|drop_path|layerdrop|jitter|mask_time_prob|mask_feature_prob")
TOKENS = re.compile(r"(token_id|token_ids|token_index|token_indices|_start_id|_end_id|_newline_id|_patch_id)$")
FEATURES = re.compile(r"^(vision_feature_layers?|feature_layer)$")
ON_CPU = (None, "eager", "sdpa")
"""Attention that any part can be built with; others, Longspan's too, are set when the model is there."""
ORDINARY = 64
"""Special tokens below it keep their number."""


def tiny_config(config: Any) -> Any:
    """A configuration of the same class for a model of a few thousand weights."""
    if not hasattr(config, "get_text_config"):
        raise CannotShrinkError(
            f"a tiny copy is made of a configuration of transformers, but {type(config).__name__} was given."
        )
    tiny = copy.deepcopy(config)
    parts = list(_parts(config, tiny, vars(config.get_text_config())))
    known = {sizes.hidden_then: sizes.hidden for _, _, sizes in reversed(parts) if sizes.hidden_then}
    text = next((sizes.hidden for given, _, sizes in parts if given is vars(config.get_text_config())), None)
    tokens = Tokens(min(VOCABULARY, getattr(config.get_text_config(), "vocab_size", None) or VOCABULARY))
    for given, made, sizes in parts:
        sizes.elsewhere, sizes.text = known, text if given is not vars(config.get_text_config()) else None
        made.update(_small(given, sizes, tokens))
        made.pop("quantization_config", None)  # of weights that a tiny copy does not have
        if made.get("_attn_implementation_internal") not in ON_CPU:
            made["_attn_implementation_internal"] = None
    for part in _configs(tiny):
        change = EXCEPTIONS.get(part.model_type)
        if change is not None:
            change(part)
    _check(tiny)
    return tiny


def special_tokens(config: Any) -> set[int]:
    """Numbers of tokens that stand for something else than text: ends, padding, places of images."""
    found: set[int] = set()
    for part in _configs(config):
        for name, value in vars(part).items():
            if TOKENS.search(name):
                found.update(x for x in (value if isinstance(value, (list, tuple)) else [value]) if type(x) is int)
    return found


def _configs(config: Any) -> Iterator[Any]:
    """The configuration and all that it is made of."""
    yield config
    for value in vars(config).values():
        if hasattr(value, "get_text_config"):
            yield from _configs(value)


def _parts(
    config: Any, tiny: Any, around: dict[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], TinySizes]]:
    """Attributes of every part, then and now, and its sizes; parts without heads are as the one around them."""
    own = vars(config)
    known = {"ignore_keys_at_rope_validation": getattr(config, "ignore_keys_at_rope_validation", None)}
    given = {**({} if first(own, HEADS) else _counts(around)), **known, **own}
    yield own, vars(tiny), TinySizes(given)
    for name, value in own.items():
        if hasattr(value, "get_text_config"):
            yield from _parts(value, vars(tiny)[name], own)


def _counts(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in given.items() if type(value) is int}


class Tokens:
    """New numbers of special tokens: large ones become the last ones of the vocabulary, equal ones equal.

    >>> tokens = Tokens(100)
    >>> tokens.number(128000), tokens.number([128001, 128000]), tokens.number(2), tokens.number(None)
    (99, [98, 99], 2, None)
    """

    def __init__(self, vocabulary: int):
        self.vocabulary = vocabulary
        self.known: dict[int, int] = {}

    def number(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return type(value)(self.number(x) for x in value)
        if type(value) is not int or value < min(ORDINARY, self.vocabulary):
            return value
        return self.known.setdefault(value, self.vocabulary - 1 - len(self.known))


def _small(given: dict[str, Any], sizes: TinySizes, tokens: Tokens) -> dict[str, Any]:
    """The attributes of one part that get another value."""
    changed = {name: new for name, new in sizes.changed().items() if name in given}
    layers = {**given, **changed}
    kept = kept_layers(given)
    changed.update(with_layers(layers, kept))
    if given.get("_heterogeneity_spec") is not None:
        changed["_heterogeneity_spec"] = _single_layers(given["_heterogeneity_spec"], kept, sizes)
    for name, value in given.items():
        if DROPOUT.search(name) and type(value) in (int, float):
            changed[name] = type(value)(0)
        elif FEATURES.search(name):
            changed[name] = _near(value)
        elif TOKENS.search(name):
            changed[name] = tokens.number(value)
    if "rope_parameters" in given:
        rotated = changed.get("head_dim") or sizes.head_dim
        changed["rope_parameters"] = tiny_rope(given["rope_parameters"], rotated, sizes.axes)
        if moves_by_table(given) and "max_position_embeddings" in given:
            changed["max_position_embeddings"] = SWITCH
    return changed


def _near(value: Any) -> Any:
    """Layers of a part for images whose outputs are taken: a tiny copy has two, and the outputs before and after."""
    if isinstance(value, (list, tuple)):
        return type(value)(_near(x) for x in value)
    return value if type(value) is not int else max(value, -2) if value < 0 else min(value, 1)


def _single_layers(spec: Any, kept: list[int], sizes: TinySizes) -> Any:
    """What single layers have of their own (`per_layer_config`), for those that are kept."""
    made = copy.deepcopy(spec)
    made.per_layer_overrides = {
        new: {name: sizes.own_number(name, value) for name, value in spec.per_layer_overrides[old].items()}
        for new, old in enumerate(kept)
        if old in spec.per_layer_overrides
    }
    return made


def _check(tiny: Any) -> None:
    """Asks the configuration's own code whether its values fit together."""
    for part in _configs(tiny):
        for name in ("validate_architecture", "validate_layer_type"):
            check = getattr(type(part), name, None)
            try:
                if check is not None:
                    check(part)
            except Exception as error:
                raise CannotShrinkError(
                    f"a tiny copy of {type(tiny).__name__} ({tiny.model_type}) was made, but its own {name} refuses it:"
                    f" {error}"
                ) from error
