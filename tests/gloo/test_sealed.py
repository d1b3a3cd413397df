"""Plans, masks and layouts go through wrappers of modules as they are: nothing takes them apart or copies them."""

import copy
import dataclasses
import io
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch.distributed.utils import _apply_to_tensors, _recursive_to
from torch.nn.parallel.distributed import _find_tensors
from torch.utils import _pytree as pytree

import longspan as ls
from longspan.scoring.biases import RelativeBias
from longspan.torchtitan.masks import Shards
from tests.gloo import sealed_work
from tests.pool import pool

WAIT = 200.0
MASK = ls.masks.documents([5, 11]) & ls.masks.causal()
LAYOUT = ls.layouts.zigzag(16, 2)
PLAN = ls.plan(MASK, LAYOUT, q_heads=2, kv_heads=2, head_dim=8, dtype="float64")
OPAQUE = ls.masks.from_mask_mod(lambda b, h, q, kv: q >= kv, 16)


def accelerates(name):
    return getattr(pytest.importorskip("accelerate.utils"), name)


VALUES = {
    "mask": MASK,
    "function mask": OPAQUE,
    "mask per row": ls.masks.per_row(MASK, ls.masks.causal()),
    "layout": LAYOUT,
    "plan": PLAN,
    "torchtitan": Shards(MASK, LAYOUT, None),
}
WALKERS = {
    "fsdp": lambda x: _apply_to_tensors(lambda t: t.bfloat16(), x),
    "ddp": lambda x: _recursive_to(x, torch.device("cpu"), False)[0],
    "accelerate's device": lambda x: accelerates("send_to_device")(x, "cpu"),
    "accelerate's precision": lambda x: accelerates("convert_to_fp32")(x),
    "pytree": lambda x: pytree.tree_map_only(torch.Tensor, lambda t: t.bfloat16(), x),
}


@pytest.mark.parametrize("walker", WALKERS)
@pytest.mark.parametrize("name", VALUES)
def test_wrappers_hand_on_the_very_same_object(name, walker):
    given = {"x": torch.ones(2), "what": [VALUES[name]], "more": (VALUES[name], 1)}
    found = WALKERS[walker](given)
    assert found["what"][0] is VALUES[name]
    assert found["more"][0] is VALUES[name]
    assert not dataclasses.is_dataclass(VALUES[name])


def test_ddp_looks_for_no_tensors_in_them():
    assert not list(_find_tensors(list(VALUES.values())))


def test_a_table_of_biases_is_a_tensor_that_wrappers_see():
    table = torch.randn(8, 2)
    found = WALKERS["fsdp"]({"bias": RelativeBias(table)})["bias"]
    assert torch.equal(found.table, table.bfloat16())


@pytest.mark.parametrize("name", VALUES)
def test_copies_and_pickles_are_equal_as_before(name):
    value = VALUES[name]
    copies = [copy.copy(value), copy.deepcopy(value)]
    if name != "function mask":  # whose function is a lambda
        copies.append(pickle.load(io.BytesIO(pickle.dumps(value))))
    for found in copies:
        assert type(found) is type(value)
        if name == "torchtitan":
            assert (found.mask, found.layout, found.mesh) == (value.mask, value.layout, None)
        elif name != "function mask":
            assert found.fingerprint == value.fingerprint
        if name not in ("plan", "torchtitan", "function mask"):  # these are told apart by identity
            assert found == value
            assert hash(found) == hash(value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, "name" if hasattr(value, "name") else "layout", None)


def one_process(seed, steps):
    """Losses and first gradients in float32 by PyTorch alone, with dense masks and sinks as a column of scores."""
    model, ids, masks = sealed_work.made(seed)
    places = np.arange(ids.shape[1])
    dense = [torch.as_tensor(mask.allows(places[:, None], places)) for mask in masks]
    positions = torch.cat([torch.arange(n) for n in sealed_work.LENGTHS])[None]
    inside = torch.repeat_interleave(torch.arange(3), torch.tensor(sealed_work.LENGTHS)).diff() == 0
    optimizer, found, first = torch.optim.SGD(model.parameters(), lr=0.5), [], None
    for _ in range(steps):
        x = model.tokens(ids) + model.places(positions)
        for block, allowed in zip(model.blocks, dense, strict=True):
            q, k, v = block.qkv(block.norm(x)).unflatten(-1, (3, sealed_work.HEADS, -1)).permute(2, 0, 3, 1, 4)
            scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
            sinks = block.sinks[None, :, None, None].expand(*scores.shape[:3], 1)
            x = x + (torch.cat((scores, sinks), -1).softmax(-1)[..., :-1] @ v).transpose(1, 2).flatten(2)
        loss = F.cross_entropy(model.head(x)[0, :-1][inside], ids[0, 1:][inside])
        loss.backward()
        first = first or [p.grad.clone().numpy() for p in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, first


@pytest.mark.share(3)
@pytest.mark.timeout(WAIT)
@pytest.mark.parametrize("how", sealed_work.WRAPPERS)
def test_recipes_with_mixed_precision_train_as_float32_does(how):
    expected, first = one_process(3, 3)
    # A number in bfloat16 is off by up to 2**-9 of itself, and some ten of them follow each other on every way.
    budget = 1e-5 if how == "ddp" else 10 * 2**-9
    for found, gradients, same, dtype in pool(2).run(sealed_work.losses, how, 3, 3):
        assert same == [True, True]
        np.testing.assert_allclose(found, expected, rtol=budget)
        for mine, theirs in zip(gradients or (), first, strict=gradients is not None):
            assert np.linalg.norm(mine - theirs) <= 3 * budget * np.linalg.norm(theirs)
        assert dtype == ("torch.float32" if how in ("ddp", "fsdp2 output") else "torch.bfloat16")
