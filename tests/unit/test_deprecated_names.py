"""Module names of 0.2 still work, with a warning, and give the same objects."""

import importlib

import pytest

import longspan
from longspan.layouts import Layout

MOVED = {
    "longspan.integrations.huggingface": ("longspan.huggingface", "shard_inputs"),
    "longspan.integrations.hf_trainer": ("longspan.huggingface.trainer", "ContextParallelTrainer"),
    "longspan.integrations.hf_accelerate": ("longspan.huggingface.accelerate", "split_sequences"),
    "longspan.integrations.torch_api": ("longspan.torch_api", "context_parallel"),
    "longspan.schedules": ("longspan.planning", "Problem"),
    "longspan.checking": ("longspan.verification", "verify"),
}


@pytest.mark.parametrize("old", MOVED)
def test_old_module_names_warn_and_give_the_same_objects(old):
    new, name = MOVED[old]
    if "huggingface" in new:
        pytest.importorskip("transformers")
    with pytest.warns(DeprecationWarning, match=f"{old} is deprecated, use {new}"):
        value = getattr(importlib.import_module(old), name)
    assert value is getattr(importlib.import_module(new), name)
    with pytest.raises(AttributeError, match="no_such_name"):
        _ = importlib.import_module(old).no_such_name


def test_schedules_is_still_an_attribute_of_longspan():
    with pytest.warns(DeprecationWarning, match="longspan.planning"):
        assert longspan.schedules.Problem is longspan.planning.Problem
    assert isinstance(longspan.layouts.zigzag(8, 2), Layout)
