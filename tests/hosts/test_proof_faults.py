"""The proof refuses every planted fault, names what it speaks of, and accepts every twin.

Each fault is proved in one kind of batch, kinds in turn; with LONGSPAN_NIGHTLY=1 in all of its kinds, two minutes.
"""

import contextlib

import pytest
import torch

pytest.importorskip("transformers")

from longspan.huggingface import first_use
from longspan.huggingface.batches import read_batch
from longspan.huggingface.prove.check import prove
from longspan.huggingface.rules import Form
from longspan.training import BatchError
from tests.hosts import planted_layers
from tests.hosts.hf_work import SIZES, batch_of
from tests.hosts.planted import EVERYWHERE, FAULTS, TWINS, beside
from tests.lanes import NIGHTLY

FORMS = {
    "plain": Form(),
    "padded": Form(padding="left"),
    "padded right": Form(padding="right"),
    "packed": Form(packed="position_ids", positions=True),
}


def chosen(entries):
    """Each entry with one kind of batch in turn, or with all."""
    for number, entry in enumerate(entries):
        names = [name for name in FORMS if name.split()[0] in entry.forms]
        for name in names if NIGHTLY else [names[number % len(names)]]:
            yield pytest.param(entry, FORMS[name], id=f"{entry.name}, {name}")


@pytest.mark.share(2)
@pytest.mark.parametrize(("entry", "form"), list(chosen(FAULTS)))
def test_a_planted_fault_is_refused(entry, form):
    proof = prove(entry.kind, entry.settings(), form)
    assert not proof.ok
    assert entry.word in proof.reason


@pytest.mark.share(2)
@pytest.mark.parametrize(("entry", "form"), list(chosen(TWINS)))
def test_its_twin_is_not(entry, form):
    proof = prove(entry.kind, entry.settings(), form)
    assert proof.ok, proof.reason
    assert proof.error < 1e-9


def test_there_are_enough_and_no_two_of_a_name():
    assert len(FAULTS) >= 25
    assert len(TWINS) >= 8
    assert len({entry.name for entry in (*FAULTS, *TWINS)}) == len(FAULTS) + len(TWINS)
    assert all(set(entry.forms) <= set(EVERYWHERE) for entry in (*FAULTS, *TWINS))


# -- a real model at its first use -------------------------------------------------------------------------------------


class One:
    """A group of one rank: who proves, and is told."""

    def rank(self):
        return 0

    def size(self):
        return 1


def llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**SIZES))


def use(model):
    return first_use.get_rules(model, read_batch(batch_of("plain")), One(), False)


def test_a_model_with_another_layer_put_into_it_is_refused():
    model = llama()
    layer = model.model.layers[1]
    layer.mlp = planted_layers.Beside(layer.mlp, planted_layers.TokenConv(model.config))
    with pytest.raises(BatchError, match=r"layers\.1\.mlp"):
        use(model)


def test_a_model_whose_forward_was_replaced_is_refused():
    model = llama()
    mlp = model.model.layers[0].mlp
    forward = mlp.forward
    mlp.forward = lambda x: forward(x) + x.mean(1, keepdim=True)
    with pytest.raises(BatchError, match="mlp"):
        use(model)


@contextlib.contextmanager
def default_dtype(dtype):
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.bfloat16),
    "default device": lambda: torch.device("meta"),
}


@pytest.mark.parametrize("name", SURROUNDINGS)
def test_what_is_set_around_a_first_use_does_not_matter(name):
    model, batch = llama(), batch_of("plain")
    with SURROUNDINGS[name]():
        first_use.get_rules(model, read_batch(batch), One(), False)
    with SURROUNDINGS[name](), pytest.raises(BatchError, match="mixer"):
        first_use.get_rules(beside(planted_layers.TokenConv)(model.config), read_batch(batch), One(), False)
