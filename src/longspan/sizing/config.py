"""Read Hugging Face configurations strictly, and configurations of well-known models by name.

The built-in configurations have only the keys that sizes need. They were written from memory, without network access; a
test compares each with the published number of parameters, within 1%. For a model that is trained, pass its own file:
`longspan plan --config config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from longspan.errors import PlanError

# -- Reading a configuration: every size is present, an integer and positive, or the error names it --------------------


MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The keys of a `config.json`.

    >>> ConfigReader({"model_type": "llama", "hidden_size": 64}).size("hidden_size")
    64
    >>> ConfigReader({"model_type": "llama"}).size("vocab_size")
    Traceback (most recent call last):
    longspan.errors.PlanError: the configuration of a llama has no vocab_size. Give the whole config.json of the model.
    """

    keys: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.keys["model_type"])

    def size(self, *names: str, default: int | None = None) -> int:
        """A whole number above 0, under the first of these names that is there."""
        found = self.optional_size(*names)
        if found is not None:
            return found
        if default is not None:
            return default
        raise PlanError(
            f"the configuration of a {self.model_type} has no {' or '.join(names)}. Give the whole config.json of the"
            f" model."
        )

    def optional_size(self, *names: str) -> int | None:
        """The same, or None where it is missing or null."""
        for name in names:
            value = self.keys.get(name)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
                raise PlanError(f"{name} of the configuration is {value!r:.40}. A whole number above 0 is expected.")
            return value
        return None

    def count(self, *names: str, default: int = 0) -> int:
        """A whole number that may be 0."""
        given = next((self.keys[name] for name in names if self.keys.get(name) is not None), default)
        return 0 if given == 0 and not isinstance(given, bool) else self.size(*names, default=default)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.keys.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise PlanError(f"{name} of the configuration is {value!r:.40}. True or false is expected.")
        return value

    def indices(self, name: str) -> list[int] | None:
        """Numbers of layers, or None."""
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise PlanError(f"{name} of the configuration is {value!r:.60}. A list of whole numbers is expected.")
        return list(value)

    def words(self, name: str, length: int, known: tuple[str, ...]) -> list[str] | None:
        """One known word for each layer, or None where the key is missing."""
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length:
            raise PlanError(
                f"{name} of the configuration is {value!r:.60}. A word for each of {length} layers is expected."
            )
        for word in value:
            if word not in known:
                raise PlanError(
                    f"{name} of the configuration names a layer {word!r:.40}. Known of a {self.model_type}:"
                    f" {', '.join(known)}."
                )
        return [str(word) for word in value]


# -- Built-in configurations -------------------------------------------------------------------------------------------


def _config(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """A configuration from (hidden size, MLP's inner size, layers, query heads, key/value heads, vocabulary)."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "vocab_size",
    )  # fmt: skip
    return {"model_type": model_type, **dict(zip(names, sizes, strict=True)), **more}


_QWEN_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
_GPT_OSS = {"head_dim": 64, "num_experts_per_tok": 4, "sliding_window": 128}
_NEXT = {
    "head_dim": 256, "linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "linear_num_key_heads": 16, "linear_num_value_heads": 32, "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512, "num_experts": 512, "num_experts_per_tok": 10,
}  # fmt: skip
_DEEPSEEK = {
    "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
    "first_k_dense_replace": 3, "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128, "v_head_dim": 128,
}  # fmt: skip
_NEMOTRON = {
    "head_dim": 128, "mamba_num_heads": 128, "mamba_head_dim": 64, "n_groups": 8, "ssm_state_size": 128,
    "conv_kernel": 4, "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
}  # fmt: skip

BUILT_IN = {  # name: (configuration, published parameters in 1e9)
    "llama3-8b": (_config("llama", (4096, 14336, 32, 32, 8, 128256)), 8.03),
    "llama3-70b": (_config("llama", (8192, 28672, 80, 64, 8, 128256)), 70.6),
    "qwen3-8b": (_config("qwen3", (4096, 12288, 36, 32, 8, 151936), head_dim=128), 8.19),
    "qwen3-32b": (_config("qwen3", (5120, 25600, 64, 64, 8, 151936), head_dim=128), 32.8),
    "qwen3-30b-a3b": (_config("qwen3_moe", (2048, 6144, 48, 32, 4, 151936), **_QWEN_MOE), 30.5),
    "mistral-7b": (_config("mistral", (4096, 14336, 32, 32, 8, 32768)), 7.25),
    "mixtral-8x7b": (
        _config("mixtral", (4096, 14336, 32, 32, 8, 32000), num_local_experts=8, num_experts_per_tok=2), 46.7,
    ),
    "gemma3-27b": (
        _config("gemma3_text", (5376, 21504, 62, 32, 16, 262208), head_dim=128, sliding_window=1024), 27.0,
    ),
    "gpt-oss-20b": (_config("gpt_oss", (2880, 2880, 24, 64, 8, 201088), num_local_experts=32, **_GPT_OSS), 20.9),
    "gpt-oss-120b": (_config("gpt_oss", (2880, 2880, 36, 64, 8, 201088), num_local_experts=128, **_GPT_OSS), 116.8),
    "olmo2-7b": (_config("olmo2", (4096, 11008, 32, 32, 32, 100352)), 7.30),
    "deepseek-v3": (_config("deepseek_v3", (7168, 18432, 61, 128, 128, 129280), **_DEEPSEEK), 671.0),
    "qwen3-next-80b-a3b": (_config("qwen3_next", (2048, 5632, 48, 16, 2, 151936), **_NEXT), 80.0),
    "nemotron-h-8b": (_config("nemotron_h", (4096, 21504, 52, 32, 8, 131072), **_NEMOTRON), 8.1),
    "lfm2-1.2b": (
        _config("lfm2", (2048, 12288, 16, 32, 8, 65536), conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]), 1.17,
    ),
}  # fmt: skip
"""Gemma's is its language model, without the part that sees."""


def built_in_config(name: str) -> dict[str, Any]:
    """The configuration of that name.

    >>> built_in_config("qwen3-8b")["num_hidden_layers"]
    36
    """
    if name not in BUILT_IN:
        raise PlanError(
            f"model {name!r:.60} was asked for. Choose one of {', '.join(BUILT_IN)}, or give its own file, with"
            f" --config."
        )
    return dict(BUILT_IN[name][0])
