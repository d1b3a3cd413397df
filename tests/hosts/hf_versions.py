"""What the installed transformers has: tests of what an older one lacks are skipped, with the reason."""

import pytest

from longspan.huggingface.structure import CHUNKED_MASKS_SINCE, HYBRIDS_SINCE, transformers_version

LATER = {"falcon_h1": (5, 17), "nemotron_h": (5, 17), "lfm2": (5, 21), "lfm2_moe": (5, 21)}
HAS_HYBRIDS = transformers_version() >= HYBRIDS_SINCE
HAS_CHUNKED_MASKS = transformers_version() >= CHUNKED_MASKS_SINCE
RESUMES_ON_CPUS = transformers_version() >= (5, 18)
"""Before it, transformers loads optimizers to "cpu:0" on ranks without GPUs, which PyTorch refuses."""
TRAINS_SHARDED = transformers_version() >= (5, 19)
"""Before it, transformers' Trainer wraps a model that `from_pretrained` has sharded by DDP, which fails."""
NO_HYBRIDS = (
    "hybrid models go over ranks from transformers 5.15 on, Falcon-H1 and Nemotron-H from 5.17, LFM2 from 5.21 on"
)
REFUSED_BEFORE = "has a convolution over tokens, which Longspan can replace in transformers"


def has_hybrid(model_type):
    """Whether Longspan spreads this type over ranks with the installed transformers."""
    return transformers_version() >= LATER.get(model_type, HYBRIDS_SINCE)


def checkpoint_layers(model, options=None):
    """Turn on activation checkpointing, by the name that transformers has for it from 5.23 on, or by the older one."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable(options)


def skip_unknown(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {model_type}")
