"""Mutants of the execution half: each breaks one thing, and the exactness tests must notice every one of them.

A mutant is a function that patches something. `first_failure` runs a few problems of the kind that test_exact.py draws
by the hundred, with the same limits, and says what went wrong. A second, weaker battery shows how many of the mutants
pass the test that is usual in the field.
"""

import dataclasses
import math
from functools import partial

import numpy as np
import pytest
import torch

import longspan
from longspan import layouts, masks
from longspan.kernels import kernel_named
from longspan.kernels.contract import TileWork, Upstream
from longspan.layouts import Layout
from longspan.masks import Mask
from longspan.planning.plan import Plan
from longspan.planning.steps import Role
from longspan.run import merge, moves, packing, walk
from longspan.run import passes as backward
from longspan.run import passes as forward
from longspan.run.merge import Accumulator, Sum
from longspan.run.transports import Loopback
from longspan.testing import allowed, dense_attention, loopback
from longspan.tile import KnownTiles
from tests import flat_rows
from tests.exact_cases import NAMES, Oracle, anew, assert_exact, fused
from tests.flat_rows import changed
from tests.lanes import share

MUTANTS = {}


def mutant(function):
    """Enters a mutant: the first line of its docstring says what is wrong."""
    MUTANTS[function.__name__] = function
    return function


# -- where to patch ----------------------------------------------------------------------------------------------------


class Wrapped:
    """A kernel that is asked, or answers, something else."""

    def __init__(self, kernel, forward=None, backward=None):
        self.kernel, self.name, self.refuses = kernel, kernel.name, kernel.refuses
        self.honours, self.groups = kernel.honours, kernel.groups
        # Written out for mutants, and without the pairs of functions: masks here have none.
        self.forward = kernel.forward if forward is None else lambda work: forward(self._forward, *spread(work))
        self.backward = (
            kernel.backward
            if backward is None
            else lambda work, up: backward(self._backward, up.dout_BHQE, *spread(work, up), up.delta_BHQ)
        )

    def _forward(self, *args):
        return self.kernel.forward(TileWork(*args))

    def _backward(self, dout, q, k, v, out, lse, tiles, scale, delta):
        return self.kernel.backward(TileWork(q, k, v, tiles, scale), Upstream(dout, out, lse, delta))


def spread(work, up=None):
    """(q, k, v, tiles, scale), with out and lse in their midst for backward."""
    more = () if up is None else (up.out_BHQE, up.lse_BHQ)
    return work.q_BHQD, work.k_BGKD, work.v_BGKE, *more, work.tiles, work.scale


def kernels(patch, forward=None, backward=None):
    patch.setattr(loopback, "kernel_named", lambda name: Wrapped(kernel_named(name), forward, backward))


def all_tiles(patch, change, directions=("forward", "backward")):
    """Computes have other tiles: change(list of tiles, number of keys) -> list of tiles."""
    original, launch, walking = walk.tiles_for, walk.Walk.launch, []

    def changed(plan, compute, plane, q, kv):
        found = original(plan, compute, plane, q, kv)
        num_keys = kv.tensors[0].shape[2]
        return KnownTiles(change(list(found), num_keys) if walking[-1] in directions else found)

    def launched(self, *args):
        walking.append(self.direction)
        return launch(self, *args)

    patch.setattr(walk, "tiles_for", changed)
    patch.setattr(walk.Walk, "launch", launched)


def tiles(patch, change):
    """Both directions see other tiles; a change to None drops the tile."""

    def changed(found, num_keys):
        made = [change(tile, num_keys) for tile in found]
        made = [new.tight() for new in made if new is not None]
        return list(dict.fromkeys(new for new in made if new is not None and inside(new, num_keys)))

    def inside(tile, num_keys):
        return tile.q0 >= 0 and tile.k0 >= 0 and tile.k1 <= num_keys

    all_tiles(patch, changed)


def on_the_wire(patch, role, change, kinds=(forward.ForwardWalk, backward.BackwardWalk)):
    """Pieces of a role arrive as something else: change(list of tensors) -> list of tensors."""
    for kind in kinds:

        def arrived(self, transfer, found, original=kind.store_arrival):
            if transfer.piece.role is role:
                made, parts = [], []

                def part(*tensors, i, parts=parts):
                    if i == 0:  # of a message, once
                        parts[:] = change(list(tensors))
                    return parts[i].contiguous()

                for i, like in enumerate(found.tensors):
                    made.append(self.recorder.call(partial(part, i=i), found.tensors, like.shape))
                for rows, like in zip(made, found.tensors, strict=True):
                    rows.buffer.dtype = like.dtype
                found = dataclasses.replace(found, tensors=tuple(made))
            original(self, transfer, found)

        patch.setattr(kind, "store_arrival", arrived)


def steps(patch, change):
    """Every rank's steps are changed, in both directions alike: change(steps) -> steps."""
    original = Plan.steps
    patch.setattr(Plan, "steps", lambda self, rank, direction="forward": change(original(self, rank, direction)))


def gradients_of(patch, change):
    """What the kernel finds in backward is changed: change(is_remote, dq, dk, dv) -> (dq, dk, dv)."""
    attend = walk.Run.attend

    def changed(self, launch, tensors):
        found = attend(self, launch, tensors)
        if self.direction == "forward":
            return found
        own = walk.own_runs(self.job.plan.layout, self.job.rank)
        is_remote = not packing.have_all(own, launch.stores[1].runs)
        return (change(is_remote, *three) for three in found)

    patch.setattr(walk.Run, "attend", changed)


@mutant
def merge_without_rescaling(patch):
    """What was summed before is not rescaled when a larger maximum comes."""

    def merged(acc, top, num, out, lse):
        high = torch.maximum(top, lse)
        new = torch.exp(lse - high)
        acc.addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
        num.add_(new)
        top.copy_(high)

    patch.setattr(moves, "merge", merged)


@mutant
def merge_by_mean(patch):
    """Partial outputs are averaged, whatever their lse."""

    def merged(acc, top, num, out, lse):
        total = torch.logaddexp(top + num.log(), lse)
        acc.add_(out.to(acc.dtype))
        num.add_((~lse.isneginf()).to(num.dtype))
        top.copy_(total - num.log())

    patch.setattr(moves, "merge", merged)


@mutant
def merge_in_base_2(patch):
    """Weights are powers of two of natural logarithms."""

    def merged(acc, top, num, out, lse):
        high = torch.maximum(top, lse)
        base = high.masked_fill(high.isneginf(), 0.0)
        old, new = torch.exp2(top - base), torch.exp2(lse - base)
        acc.mul_(old.unsqueeze(-1)).addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
        num.mul_(old).add_(new)
        top.copy_(high)

    patch.setattr(moves, "merge", merged)


@mutant
def merge_keeps_the_last(patch):
    """A later partial replaces an earlier one."""

    def merged(acc, top, num, out, lse):
        acc.copy_(out)
        top.copy_(lse)
        num.copy_((~lse.isneginf()).to(num.dtype))

    patch.setattr(moves, "merge", merged)


@mutant
def merge_keeps_the_largest(patch):
    """The partial with the larger lse wins outright."""

    def merged(acc, top, num, out, lse):
        wins = lse > top
        acc.copy_(torch.where(wins.unsqueeze(-1), out.to(acc.dtype), acc))
        top.copy_(torch.maximum(top, lse))
        num.copy_((~top.isneginf()).to(num.dtype))

    patch.setattr(moves, "merge", merged)


@mutant
def merge_without_guard(patch):
    """Nothing minus nothing is not a number."""

    def merged(acc, top, num, out, lse):
        high = torch.maximum(top, lse)
        old, new = torch.exp(top - high), torch.exp(lse - high)
        acc.mul_(old.unsqueeze(-1)).addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
        num.mul_(old).add_(new)
        top.copy_(high)

    patch.setattr(moves, "merge", merged)


@mutant
def merge_without_maximum(patch):
    """Exponentials of whole lse values are summed, which overflows."""

    def merged(acc, top, num, out, lse):
        old, new = torch.exp(top), torch.exp(lse)
        acc.mul_(old.unsqueeze(-1)).addcmul_(out.to(acc.dtype), new.unsqueeze(-1))
        num.mul_(old).add_(new)
        top.zero_()

    patch.setattr(moves, "merge", merged)


@mutant
def merge_in_bfloat16(patch):
    """The running output is rounded to bfloat16 at every merge when the inputs are bfloat16."""
    original = merge.merge

    def merged(acc, top, num, out, lse):
        original(acc, top, num, out, lse)
        if acc.dtype == torch.float32:
            acc.copy_(acc.bfloat16())

    patch.setattr(moves, "merge", merged)


@mutant
def statistics_in_bfloat16(patch):
    """lse is rounded to bfloat16 when the inputs are bfloat16."""
    result = Accumulator.result

    def rounded(self):
        out, lse = result(self)
        return out, changed(lambda lse: lse.bfloat16().float(), lse) if self._dtype == torch.bfloat16 else lse

    patch.setattr(Accumulator, "result", rounded)


@mutant
def lse_loses_the_sum(patch):
    """lse is the largest lse of the partials."""

    def merged(acc, top, num, out, lse):
        high = torch.maximum(top, lse)
        base = high.masked_fill(high.isneginf(), 0.0)
        total = torch.exp(top - base) + torch.exp(lse - base)
        acc.mul_((torch.exp(top - base) / total.clamp(min=1e-30)).unsqueeze(-1))
        acc.addcmul_(out.to(acc.dtype), (torch.exp(lse - base) / total.clamp(min=1e-30)).unsqueeze(-1))
        top.copy_(high)
        num.copy_((~high.isneginf()).to(num.dtype))

    patch.setattr(moves, "merge", merged)


@mutant
def empty_rows_have_lse_zero(patch):
    """A row that sees nothing gets lse 0, as some kernels say."""
    result = Accumulator.result

    def filled(self):
        out, lse = result(self)
        return out, changed(lambda lse: lse.masked_fill(lse.isneginf(), 0.0), lse)

    patch.setattr(Accumulator, "result", filled)


@mutant
def gradients_summed_in_bfloat16(patch):
    """The running sums of gradients are rounded to bfloat16 at every addition when the inputs are bfloat16."""
    absorb = Sum._absorb

    def rounded(self, state, part):
        absorb(self, state, part)
        for rows in state:
            if rows.dtype == torch.float32:
                rows.copy_(changed(lambda t: t.bfloat16().float(), rows))

    patch.setattr(Sum, "_absorb", rounded)


@mutant
def later_gradients_lost(patch):
    """Rows that have a gradient already take no more."""
    add = Sum.add

    def once(self, start, stop, *part):
        if (start, stop) not in self.__dict__.setdefault("ranges", set()):
            self.ranges.add((start, stop))
            add(self, start, stop, *part)

    patch.setattr(Sum, "add", once)


# -- what kernels are asked and answer ---------------------------------------------------------------------------------


@mutant
def scale_halved_forward(patch):
    """Forward uses half the scale."""
    kernels(patch, forward=lambda run, q, k, v, found, scale: run(q, k, v, found, scale / 2))


@mutant
def scale_lost_backward(patch):
    """Backward uses scale 1."""

    def run_backward(run, dout, q, k, v, out, lse, found, scale, delta):
        return run(dout, q, k, v, out, lse, found, 1.0, delta)

    kernels(patch, backward=run_backward)


@mutant
def scale_twice_in_dq(patch):
    """dq is scaled once more."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq * 0.35, dk, dv))


@mutant
def lse_in_base_2(patch):
    """Kernels hand over logarithms to base 2."""

    def run_forward(run, *args):
        for out, lse in run(*args):
            yield out, lse / math.log(2)

    kernels(patch, forward=run_forward)


@mutant
def delta_omitted(patch):
    """Backward does without rowsum(dout * out)."""

    def run_backward(run, dout, q, k, v, out, lse, found, scale, delta):
        return run(dout, q, k, v, torch.zeros_like(out), lse, found, scale, torch.zeros_like(delta))

    kernels(patch, backward=run_backward)


@mutant
def delta_doubled(patch):
    """Backward subtracts rowsum(dout * out) twice."""

    def run_backward(run, dout, q, k, v, out, lse, found, scale, delta):
        return run(dout, q, k, v, 2 * out, lse, found, scale, 2 * delta)

    kernels(patch, backward=run_backward)


def _local(run, q, k, v, found, scale):
    """Each tile's own (out, lse)."""
    reference = kernel_named("reference").forward
    return dict(zip(found, reference(TileWork(q, k, v, found, scale)), strict=True))


@mutant
def delta_from_local_output(patch):
    """delta is taken from the output of each tile, not from the merged one."""

    def run_backward(run, dout, q, k, v, out, lse, found, scale, delta):
        for tile, (part, _) in _local(run, q, k, v, found, scale).items():
            out, delta = out.clone(), delta.clone()
            out[:, :, tile.q0 : tile.q1] = part
            delta[:, :, tile.q0 : tile.q1] = (part * dout[:, :, tile.q0 : tile.q1]).sum(-1)
            yield from run(dout, q, k, v, out, lse, [tile], scale, delta)

    kernels(patch, backward=run_backward)


@mutant
def lse_of_the_tile_in_backward(patch):
    """Backward normalises each tile by itself."""

    def run_backward(run, dout, q, k, v, out, lse, found, scale, delta):
        for tile, (_, part) in _local(run, q, k, v, found, scale).items():
            lse = lse.clone()
            lse[:, :, tile.q0 : tile.q1] = part
            yield from run(dout, q, k, v, out, lse, [tile], scale, delta)

    kernels(patch, backward=run_backward)


@mutant
def heads_in_the_wrong_groups(patch):
    """Query head h uses key head h modulo their number."""

    def regroup(t, num_kv):
        return t.unflatten(1, (num_kv, -1)).transpose(1, 2).flatten(1, 2)

    def run_forward(run, q, k, v, found, scale):
        for out, lse in run(regroup(q, k.shape[1]), k, v, found, scale):
            yield regroup(out, q.shape[1] // k.shape[1]), regroup(lse, q.shape[1] // k.shape[1])

    kernels(patch, forward=run_forward)


@mutant
def heads_shifted_by_one(patch):
    """Query head h gets the result of head h - 1."""

    def run_forward(run, *args):
        for out, lse in run(*args):
            yield out.roll(1, 1), lse.roll(1, 1)

    kernels(patch, forward=run_forward)


@mutant
def key_heads_shifted_by_one(patch):
    """dk and dv land on the next head."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq, dk.roll(1, 1), dv.roll(1, 1)))


@mutant
def batch_rows_mixed(patch):
    """Queries meet the keys of another batch row."""
    kernels(patch, forward=lambda run, q, k, v, found, scale: run(q, k.flip(0), v, found, scale))


@mutant
def tile_dropped(patch):
    """Of three tiles or more, forward forgets the last."""
    all_tiles(patch, lambda found, _: found[:-1] if len(found) > 2 else found, ["forward"])


@mutant
def tile_counted_twice_forward(patch):
    """The first tile of a compute is merged twice."""
    all_tiles(patch, lambda found, _: [*found[:1], *found], ["forward"])


@mutant
def tile_counted_twice_backward(patch):
    """The gradients of the first tile of a compute are added twice."""
    all_tiles(patch, lambda found, _: [*found[:1], *found], ["backward"])


@mutant
def dq_zero(patch):
    """dq is 0."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq * 0, dk, dv))


@mutant
def dq_from_local_keys_only(patch):
    """Remote keys add nothing to dq."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq * (not is_remote), dk, dv))


@mutant
def dkv_of_remote_keys_dropped(patch):
    """Remote keys get no gradient."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq, dk * (not is_remote), dv * (not is_remote)))


@mutant
def dk_of_remote_keys_counted_twice(patch):
    """Remote keys get their gradient twice, as when a buffer is not cleared after it was sent."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq, dk * (1 + is_remote), dv))


@mutant
def dv_of_remote_keys_dropped(patch):
    """Remote values get no gradient."""
    gradients_of(patch, lambda is_remote, dq, dk, dv: (dq, dk, dv * (not is_remote)))


@mutant
def gradient_of_lse_ignored(patch):
    """What flows back into lse is lost."""
    init = backward.Backward.__init__

    def made(self, job, saved, dout, dlse=None):
        init(self, job, saved, dout)

    patch.setattr(backward.Backward, "__init__", made)


@mutant
def gradient_of_lse_negated(patch):
    """What flows back into lse has the wrong sign."""
    init = backward.Backward.__init__

    def made(self, job, saved, dout, dlse=None):
        init(self, job, saved, dout, None if dlse is None else -dlse)

    patch.setattr(backward.Backward, "__init__", made)


# -- tiles -------------------------------------------------------------------------------------------------------------


@mutant
def lower_bound_one_too_high(patch):
    """A token no longer sees itself."""
    tiles(patch, lambda t, k: dataclasses.replace(t, lo=None if t.lo is None else t.lo + 1))


@mutant
def lower_bound_one_too_low(patch):
    """A token sees the next one."""
    tiles(patch, lambda t, k: dataclasses.replace(t, lo=None if t.lo is None else t.lo - 1))


@mutant
def window_one_too_wide(patch):
    """Windows reach one token further back."""
    tiles(patch, lambda t, k: dataclasses.replace(t, hi=None if t.hi is None else t.hi + 1))


@mutant
def window_ignored(patch):
    """Windows have no far end inside a tile."""
    tiles(patch, lambda t, k: dataclasses.replace(t, hi=None))


@mutant
def causal_ignored(patch):
    """Nothing is hidden inside a tile."""
    tiles(patch, lambda t, k: dataclasses.replace(t, lo=None))


@mutant
def causal_from_the_other_corner(patch):
    """The diagonal of a tile that is not square ends in the other corner."""

    def change(t, k):
        return t if t.lo is None else dataclasses.replace(t, lo=t.lo - (t.cols - t.rows))

    tiles(patch, change)


@mutant
def local_positions(patch):
    """Causality goes by places in the shard, not by positions in the sequence."""
    tiles(patch, lambda t, k: dataclasses.replace(t, lo=t.k0 - t.q0, hi=None))


@mutant
def documents_ignored(patch):
    """Tiles reach back to the first key that is held."""

    def change(t, k):
        lo, hi = (None if bound is None else bound - t.k0 for bound in (t.lo, t.hi))
        return dataclasses.replace(t, k0=0, lo=lo, hi=None if hi is None else hi + 2 * t.k0)

    tiles(patch, change)


@mutant
def key_rows_one_off(patch):
    """Tiles begin at the row after their first key."""
    tiles(patch, lambda t, num: dataclasses.replace(t, k0=t.k0 + 1, k1=t.k1 + 1) if t.k1 < num else t)


@mutant
def last_key_of_tiles_lost(patch):
    """Tiles end one key early."""
    tiles(patch, lambda t, k: dataclasses.replace(t, k1=t.k1 - 1) if t.cols > 1 else t)


@mutant
def padding_attended(patch):
    """Tiles that reach the last token of a shard go on into its padding."""
    state = {}
    launch = walk.Walk.launch

    def launched(self, *args):
        layout, rank = self.job.plan.layout, self.job.rank
        state.update(padding=layout.num_padding(rank), slots=layout.num_slots(rank))
        return launch(self, *args)

    patch.setattr(walk.Walk, "launch", launched)

    def change(t, num):
        padded = state["padding"] and num == state["slots"] and t.k1 == num - state["padding"]
        return dataclasses.replace(t, k1=num, lo=None, hi=None) if padded else t

    tiles(patch, change)


# -- messages ----------------------------------------------------------------------------------------------------------


@mutant
def k_and_v_swapped_on_the_wire(patch):
    """K arrives as V and V as K."""
    on_the_wire(patch, Role.KV, lambda t: [t[1], t[0]] if t[0].shape == t[1].shape else t)


@mutant
def v_of_another_message(patch):
    """V is that of the message before."""
    seen = {}

    def change(t):
        before, seen[t[1].shape] = seen.get(t[1].shape, t[1]), t[1].clone()
        return [t[0], before]

    on_the_wire(patch, Role.KV, change)


@mutant
def keys_one_row_off_on_the_wire(patch):
    """Remote K is placed one row late."""
    on_the_wire(patch, Role.KV, lambda t: [t[0].roll(1, 2), t[1]])


@mutant
def key_heads_mixed_on_the_wire(patch):
    """Heads of remote V come in another order."""
    on_the_wire(patch, Role.KV, lambda t: [t[0], t[1].flip(1)])


@mutant
def stale_kv_in_backward(patch):
    """In backward, K and V that come again are those that came first."""
    seen = {}

    def change(t):
        return seen.setdefault(t[0].shape, [x.clone() for x in t])

    on_the_wire(patch, Role.KV, change, kinds=[backward.BackwardWalk])


@mutant
def queries_one_row_off_on_the_wire(patch):
    """Queries that travel are placed one row late."""
    on_the_wire(patch, Role.Q, lambda t: [t[0].roll(1, 2)])


@mutant
def output_one_row_off_on_the_wire(patch):
    """Outputs that travel home are placed one row late."""
    on_the_wire(patch, Role.OUT, lambda t: [x.roll(1, 2) for x in t])


@mutant
def lse_lost_on_the_wire(patch):
    """Outputs travel home without their lse."""
    on_the_wire(patch, Role.OUT, lambda t: [t[0], t[1] * 0])


@mutant
def dout_not_sent(patch):
    """Gradients of outputs stay at home."""
    on_the_wire(patch, Role.DOUT, lambda t: [t[0] * 0, *t[1:]])


@mutant
def delta_not_sent(patch):
    """Row sums stay at home."""
    on_the_wire(patch, Role.DOUT, lambda t: [t[0], t[1], t[2] * 0])


@mutant
def lse_and_delta_swapped_on_the_wire(patch):
    """lse arrives as delta and delta as lse."""
    on_the_wire(patch, Role.DOUT, lambda t: [t[0], t[2], t[1]])


@mutant
def dq_not_sent(patch):
    """Gradients of queries do not come home."""
    on_the_wire(patch, Role.DQ, lambda t: [t[0] * 0])


@mutant
def dkv_not_sent(patch):
    """Gradients of keys and values do not come home."""
    on_the_wire(patch, Role.DKV, lambda t: [x * 0 for x in t])


@mutant
def dkv_sent_twice(patch):
    """Gradients of keys and values come home twice."""
    on_the_wire(patch, Role.DKV, lambda t: [x * 2 for x in t])


@mutant
def dkv_one_row_off_on_the_wire(patch):
    """Gradients of keys and values come home one row late."""
    on_the_wire(patch, Role.DKV, lambda t: [x.roll(1, 2) for x in t])


class Meddling(Loopback):
    """A loopback whose messages may be changed on their way."""

    def change(self, message, now, src, dst, exchange):
        raise NotImplementedError

    def _take(self, now, src, dst, exchange):
        return self.change(super()._take(now, src, dst, exchange), now, src, dst, exchange)


def messages(patch, change):
    patch.setattr(loopback, "Loopback", type("Changed", (Meddling,), {"change": change}))


@mutant
def message_truncated(patch):
    """The last eighth of every message is missing."""

    def change(self, message, *_):
        message[message.numel() - message.numel() // 8 :] = 0
        return message

    messages(patch, change)


@mutant
def message_lost(patch):
    """What arrives in the second step is zeros."""

    def change(self, message, now, src, dst, exchange):
        return message.zero_() if exchange.step == 1 else message

    messages(patch, change)


@mutant
def message_from_the_wrong_rank(patch):
    """Where two ranks send equally long messages, they are mixed up."""

    def change(self, message, now, src, dst, exchange):
        for other, found in now.items():
            if other != src and dst in found.sends and found.sends[dst].numel() == message.numel():
                return found.sends[dst].clone()
        return message

    messages(patch, change)


@mutant
def early_messages_lost(patch):
    """What arrives later than in its own step is zeros."""

    def change(self, message, now, src, dst, exchange):
        return message.zero_() if exchange.due > exchange.step else message

    messages(patch, change)


# -- steps, rows and kept pieces ---------------------------------------------------------------------------------------


def _without_computes(which):
    def change(found):
        busy = [number for number, step in enumerate(found) if step.computes]
        if len(busy) < 2:
            return found
        return tuple(
            dataclasses.replace(step, computes=()) if number == busy[which] else step
            for number, step in enumerate(found)
        )

    return change


@mutant
def last_hop_dropped(patch):
    """The last step computes nothing."""
    steps(patch, _without_computes(-1))


@mutant
def second_stage_dropped(patch):
    """The second step that has something to compute does not."""
    steps(patch, _without_computes(1))


@mutant
def first_step_dropped_in_backward(patch):
    """Backward's first computes are forgotten; forward is right."""
    original, change = Plan.steps, _without_computes(0)

    def changed(self, rank, direction="forward"):
        found = original(self, rank, direction)
        return change(found) if direction == "backward" else found

    patch.setattr(Plan, "steps", changed)


@mutant
def shards_taken_to_be_sorted(patch):
    """Local rows are taken to lie in the order of their positions."""
    laid_out = packing.laid_out
    for module in (packing, walk):
        patch.setattr(module, "laid_out", lambda spans: laid_out(spans[np.argsort(spans[:, 0])]))


@mutant
def kept_pieces_swapped(patch):
    """Backward finds the kept pieces in another order."""
    program = forward.Forward.program

    def swapped(self, *, saves):
        out, lse, kept = yield from program(self, saves=saves)
        return out, lse, kept[::-1]

    patch.setattr(forward.Forward, "program", swapped)


@mutant
def kept_pieces_lost(patch):
    """Backward finds zeros where pieces were kept."""
    program = forward.Forward.program

    def lost(self, *, saves):
        out, lse, kept = yield from program(self, saves=saves)
        return out, lse, [torch.zeros_like(t) for t in kept]

    patch.setattr(forward.Forward, "program", lost)


@mutant
def returned_kv_not_taken(patch):
    """K and V that come back in backward are not taken up."""
    arrived = backward.BackwardWalk.store_arrival

    def ignoring(self, transfer, found):
        if transfer.piece.role is not Role.KV:
            arrived(self, transfer, found)

    patch.setattr(backward.BackwardWalk, "store_arrival", ignoring)


@mutant
def pieces_dropped_too_early(patch):
    """What arrived is forgotten a step before its last use."""
    hold = walk.Walk.hold
    patch.setattr(walk.Walk, "hold", lambda self, role, found, until: hold(self, role, found, until - 1))


# -- the battery -------------------------------------------------------------------------------------------------------

S, WORLD = 48, 4
RAGGED = Layout.from_spans(S, [[(30, 48), (3, 4)], [], [(0, 3), (4, 29)], [(29, 30)]], name="ragged")
DOCUMENTS = masks.documents([17, 1, 21, 9]) & masks.causal()
HOLES = masks.documents([17, 1, 21, 9]) & masks.sliding_window(6, 2) & ~Mask.of_bands(
    np.array([[20, 26, 0, S, -S, S]]), S, "rows 20:26"
)  # fmt: skip
LONG = 256
MANY_SPANS = Layout.from_spans(LONG, [[(i, i + 1) for i in reversed(range(LONG))]], name="many")  # not to be joined
FEW_ROWS = Mask.of_bands(np.array([[0, 8, 0, LONG, -LONG, LONG]]), LONG, "8 rows")
FEW_KEYS = Mask.of_bands(np.array([[0, LONG, 0, 8, -LONG, LONG]]), LONG, "8 keys")

PROBLEMS = [  # mask, layout, scheme, dtype, options
    (DOCUMENTS, layouts.zigzag(S, WORLD), "ring", torch.float64, {}),
    (HOLES, RAGGED, "exchange", torch.float64, {"keep": True}),
    (masks.causal(S - 1), layouts.zigzag(S - 1, WORLD, equal_tokens=True), "all_to_all", torch.float64, {}),
    (masks.causal(S - 1), layouts.contiguous(S - 1, WORLD, equal_tokens=True), "ring", torch.float64, {}),
    (masks.full(S), layouts.striped(S, WORLD, stripe=3), "hybrid(2)", torch.float64, {"v_head_dim": 5}),
    (HOLES | masks.global_prefix(2), RAGGED, "hybrid(2,exchange)", torch.float64, {}),
    (masks.causal(S), layouts.contiguous(S, WORLD), "exchange", torch.float64, {"fetch_bytes": 16 * 2 * 2 * 16 * 8}),
    (masks.causal(S), layouts.zigzag(S, WORLD), "staged", torch.float64, {}),
    (DOCUMENTS, layouts.striped(S, WORLD, stripe=6), "all_gather", torch.float64, {"v_head_dim": 11}),
    (masks.causal(S), layouts.zigzag(S, WORLD), "ring", torch.bfloat16, {}),
    (FEW_ROWS, MANY_SPANS, "ring", torch.bfloat16, {}),
    (FEW_KEYS, MANY_SPANS, "ring", torch.bfloat16, {}),
]


def _problem(mask, layout, scheme, dtype, options):
    sizes = {"q_heads": 4, "kv_heads": 2, "head_dim": 8, "v_head_dim": 8, "batch": 2} | options
    plan = longspan.plan(mask, layout, scheme=scheme, dtype=dtype, **sizes)
    draw = torch.Generator().manual_seed(3)
    made = [(4, 8), (2, 8), (2, sizes["v_head_dim"]), (4, sizes["v_head_dim"])]
    inputs = [torch.randn(2, h, layout.seq_len, d, generator=draw, dtype=torch.float64).to(dtype) for h, d in made]
    oracle = Oracle.of(*inputs, mask, 8**-0.5)
    baseline = None if dtype == torch.float64 else oracle.errors(fused(*inputs, oracle.seen, 8**-0.5))
    return plan, inputs, oracle, baseline


@pytest.fixture(scope="module")
def problems():
    return [_problem(*given) for given in PROBLEMS]


def _with_gradient_of_lse():
    """float64 gradients where both out and lse are used; rows that see nothing give lse no gradient."""
    plan, (q, k, v, dout), *_ = _problem(masks.causal(S), layouts.zigzag(S, 2), "ring", torch.float64, {})
    dlse = torch.randn(q.shape[:3], generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    leaves = [t.clone().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(dense_attention(*leaves, plan.mask, 8**-0.5), leaves, (dout, dlse))
    shards = [[plan.layout.shard(t, rank, 2) for t in (q, k, v, dout, dlse)] for rank in range(2)]
    jobs = [walk.Job(plan, rank, loopback.kernel_named("reference"), 8**-0.5, q.dtype) for rank in range(2)]
    pairs = list(zip(jobs, shards, strict=True))
    run = loopback.Loopback().run([forward.Forward(job, *own[:3]).program(saves=True) for job, own in pairs])
    programs = [
        backward.Backward(job, backward.Saved(*own[:3], out, lse, kept), *own[3:]).program()
        for (job, own), (out, lse, kept) in zip(pairs, run, strict=True)
    ]
    found = zip(*loopback.Loopback().run(programs), strict=True)
    for name, parts, wanted in zip(NAMES[2:], found, expected, strict=True):
        error = (plan.layout.unshard(list(parts), 2) - wanted).norm() / wanted.norm()
        assert error <= 1e-12, f"{name} with a gradient of lse is off by {error:.1e}"


def _merge_unit():
    """Partials that the runner never sees together in the problems above: nothing first, and very large lse."""
    like = torch.zeros(1, 1, 3, 1)
    made = flat_rows.Accumulator(like, 1)
    for value, lse in ((0.0, [-torch.inf] * 3), (1.0, [-torch.inf, 2.0, 2e4]), (3.0, [-torch.inf, 2.0, 2e4])):
        made.add(0, 3, torch.full((1, 1, 3, 1), value), torch.tensor(lse).view(1, 1, 3))
    out, lse = made.result()
    assert out.flatten().tolist() == [0.0, 2.0, 2.0]
    assert lse.flatten().tolist() == pytest.approx([-math.inf, 2 + math.log(2), 2e4 + math.log(2)])


def first_failure(problems):
    """What the battery has to say: None, or the first thing that went wrong."""
    try:
        for plan, inputs, oracle, baseline in problems:
            for kernel in ("reference", "auto"):
                fresh = anew(plan)  # what was remembered about a plan is of no use to mutants of it
                fresh._steps.update(plan._steps)
                found = loopback.run_loopback(fresh, *inputs, kernel=kernel, scale=8**-0.5)
                assert_exact(oracle, found, baseline, f"{kernel}, {plan!r}")
        _with_gradient_of_lse()
        _merge_unit()
    except (AssertionError, RuntimeError) as error:  # any other would be a mistake in the mutant
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]:.90}"
    return None


def test_the_battery_passes_without_mutants(problems):
    assert first_failure(problems) is None


def test_every_mutant_is_killed(problems, monkeypatch, capsys):
    assert len(MUTANTS) >= 40
    found = {}
    for name, mutate in share(MUTANTS.items(), 6):
        with monkeypatch.context() as patch:
            mutate(patch)
            found[name] = first_failure(problems)
    with capsys.disabled():
        for name, failure in found.items():
            print(f"  {name:36s} {failure}")
    survivors = [name for name, failure in found.items() if failure is None]
    assert not survivors, f"{len(survivors)} of {len(found)} mutants live: {survivors}"
    assert first_failure(problems) is None, "a mutant was not taken back"


@pytest.mark.nightly
def test_the_usual_inputs_let_mutants_live(monkeypatch, capsys):
    """Numbers between 0 and 1, the sum of the output as loss, absolute tolerances that grow with the ranks.

    With these, weights hardly differ and most of the gradient of q and k cancels, so that wrong ones are near enough.
    Mutants that change no bit here (of heads that share no keys, of documents...) are left out of the count.
    """
    tokens, dim, tolerance = 1024, 32, {"atol": 8e-3 * WORLD, "rtol": 1e-3 * WORLD}
    q, k, v = torch.rand(3, 1, 2, tokens, dim, generator=torch.Generator().manual_seed(5))
    living, caught = {}, set()
    for mask in (masks.full(tokens), masks.causal(tokens)):
        sizes = {"q_heads": 2, "kv_heads": 2, "head_dim": dim, "dtype": q.dtype}
        plan = longspan.plan(mask, layouts.zigzag(tokens, WORLD), scheme="ring", **sizes)
        leaves = [t.clone().requires_grad_() for t in (q, k, v)]
        out = torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=allowed(mask, 1, 2, tokens))
        expected = out.detach(), *torch.autograd.grad(out.sum(), leaves)
        right = _usual_run(plan, q, k, v)
        assert right is not None
        assert _close(right, expected, tolerance)
        for name, mutate in MUTANTS.items():
            with monkeypatch.context() as patch:
                mutate(patch)
                found = _usual_run(plan, q, k, v)
            if found is None or not _close(found, expected, tolerance):
                caught.add(name)
            elif any(not torch.equal(a, b) for a, b in zip(found, right, strict=True)):
                living.setdefault(name, []).append(mask)
    with capsys.disabled():
        print(f"\n  {len(living)} mutants pass the usual test with one mask or both:")
        print("".join(f"    {name}: {found}\n" for name, found in living.items()), end="")
    assert {"merge_by_mean", "dq_zero", "dq_from_local_keys_only"} <= set(living)
    assert len(set(living) - caught) >= 3, "with both masks"


def _usual_run(plan, q, k, v):
    """Output and gradients, or None if the run failed."""
    try:
        out, _, *gradients = loopback.run_loopback(anew(plan), q, k, v, torch.ones_like(q))
    except (AssertionError, RuntimeError):
        return None
    return out, *gradients


def _close(found, expected, tolerance):
    return all(torch.allclose(a, b, **tolerance) for a, b in zip(found, expected, strict=True))
