"""Small sizes for one part of a configuration, by the names of its attributes and by how their values are related.

Heads keep their ratio, features are heads times features per head where they were, and a size that was equal to
another one still is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from longspan.integrations.huggingface.proving.tiny_rope import SWITCH, axes_of, rope_parts

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
