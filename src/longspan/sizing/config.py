"""Read Hugging Face configurations strictly, and configurations of well-known models by name.

The built-in configurations have only the keys that sizes need. They were written from memory, without network access; a
test compares each with the published number of parameters, within 1%. For a model that is trained, pass its own file:
`longspan plan --config config.json`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from longspan.errors import PlanError

MOST = 1 << 40


@dataclass(frozen=True, slots=True)
class ConfigReader:
    """The keys of a `config.json`. Every size must be present, an integer and positive, or the error names it.

    >>> ConfigReader({"model_type": "llama", "hidden_size": 64}).size("hidden_size")
    64
    >>> ConfigReader({"model_type": "llama"}).size("vocab_size")
    Traceback (most recent call last):
    longspan.errors.PlanError: the configuration of a llama has no vocab_size. Pass the whole config.json of the model.
    """

    keys: Mapping[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.keys["model_type"])

    def size(self, *names: str, default: int | None = None) -> int:
        """Return a positive integer, under the first of these names that is present."""
        value = self.optional_size(*names)
        value = default if value is None else value
        if value is None:
            raise PlanError(
                f"the configuration of a {self.model_type} has no {' or '.join(names)}. Pass the whole config.json of"
                " the model."
            )
        return value

    def optional_size(self, *names: str) -> int | None:
        """Return a positive integer, or None where it is missing or null."""
        for name in names:
            value = self.keys.get(name)
            if value is not None:
                if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MOST:
                    raise _wrong(name, "a positive integer", value)
                return value
        return None

    def count(self, *names: str, default: int = 0) -> int:
        """Return an integer that may be 0."""
        value = next((self.keys[name] for name in names if self.keys.get(name) is not None), default)
        return 0 if value == 0 and not isinstance(value, bool) else self.size(*names, default=default)

    def flag(self, name: str, default: bool = False) -> bool:
        """Return a bool."""
        value = self.keys.get(name)
        if value is not None and not isinstance(value, bool):
            raise _wrong(name, "true or false", value)
        return default if value is None else value

    def indices(self, name: str) -> list[int] | None:
        """Return indices of layers, or None where the key is missing."""
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or any(isinstance(x, bool) or not isinstance(x, int) for x in value):
            raise _wrong(name, "a list of integers", value)
        return list(value)

    def words(self, name: str, length: int, known: tuple[str, ...]) -> list[str] | None:
        """Return one known word for each layer, or None where the key is missing."""
        value = self.keys.get(name)
        if value is None:
            return None
        if not isinstance(value, list | tuple) or len(value) != length:
            raise _wrong(name, f"a list of {length} words, one for each layer", value)
        for word in value:
            if word not in known:
                raise _wrong(name, f"words of a {self.model_type} ({', '.join(known)})", word)
        return [str(word) for word in value]


def _wrong(name: str, expected: str, value: Any) -> PlanError:
    return PlanError(f"`{name}` of the configuration must be {expected}, but got {value!r:.60}.")


# -- Built-in configurations -------------------------------------------------------------------------------------------


def _config(model_type: str, sizes: tuple[int, ...], **more: Any) -> dict[str, Any]:
    """Return a configuration of (hidden size, MLP size, layers, query heads, key/value heads, vocabulary size)."""
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
"""Gemma's is its language model, without the vision encoder."""


HUB = {
    "meta-llama/meta-llama-3-8b": "llama3-8b",
    "meta-llama/llama-3.1-8b": "llama3-8b",
    "meta-llama/meta-llama-3-70b": "llama3-70b",
    "meta-llama/llama-3.1-70b": "llama3-70b",
    "meta-llama/llama-3.3-70b": "llama3-70b",
    "qwen/qwen3-8b": "qwen3-8b",
    "qwen/qwen3-32b": "qwen3-32b",
    "qwen/qwen3-30b-a3b": "qwen3-30b-a3b",
    "mistralai/mistral-7b-v0.3": "mistral-7b",
    "mistralai/mixtral-8x7b-v0.1": "mixtral-8x7b",
    "google/gemma-3-27b": "gemma3-27b",
    "openai/gpt-oss-20b": "gpt-oss-20b",
    "openai/gpt-oss-120b": "gpt-oss-120b",
    "allenai/olmo-2-1124-7b": "olmo2-7b",
    "deepseek-ai/deepseek-v3": "deepseek-v3",
    "qwen/qwen3-next-80b-a3b": "qwen3-next-80b-a3b",
    "nvidia/nemotron-h-8b-base-8k": "nemotron-h-8b",
    "liquidai/lfm2-1.2b": "lfm2-1.2b",
}
"""Names on the Hub, in small letters and without the word for a tuned variant, of models that are built in."""
VARIANTS = ("-instruct-2507", "-thinking-2507", "-instruct", "-thinking", "-base", "-it", "-pt")


def built_in_config(name: str) -> dict[str, Any]:
    """Return the built-in configuration of a model, by its name here or on the Hub.

    >>> built_in_config("qwen3-8b")["num_hidden_layers"]
    36
    >>> built_in_config("Qwen/Qwen3-8B-Base") == built_in_config("qwen3-8b")
    True
    """
    short = name.lower()
    ending = next((variant for variant in VARIANTS if short.endswith(variant) and short not in HUB), "")
    known = HUB.get(short.removesuffix(ending), name)
    if known not in BUILT_IN:
        near = get_close_matches(short, BUILT_IN, 1, 0.8)
        raise PlanError(
            f"`model` must be one of {', '.join(BUILT_IN)}, but got {name!r:.60}."
            f"{f' Did you mean {near[0]}?' if near else ''} For another model, pass its file with --config."
        )
    return dict(BUILT_IN[known][0])
