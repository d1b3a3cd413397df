"""What the installed transformers has: tests of what an older one lacks are skipped, with the reason."""

import pytest

from longspan.integrations.huggingface._transformers import CHUNKED_MASKS_SINCE, HYBRIDS_SINCE, installed

HAS_HYBRIDS = installed() >= HYBRIDS_SINCE
HAS_CHUNKED_MASKS = installed() >= CHUNKED_MASKS_SINCE
NO_HYBRIDS = "hybrid models go over ranks from transformers 5.15 on"


def skip_unknown(model_type):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if model_type not in CONFIG_MAPPING_NAMES:
        pytest.skip(f"this version of transformers has no {model_type}")
