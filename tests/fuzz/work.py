"""One rank runs a case and compares what it finds with the oracle."""

import logging
import traceback

import torch
import torch.distributed as dist

import longspan as ls

from .calls import compute, make_mask, make_plan
from .cases import Call, Case
from .expected import Expected, losses
from .oracle import cut, leaf_shapes


def shard(x, positions, dim, tokens):
    """A rank's part along a dim; slots of padding hold 0."""
    real = positions < tokens
    index = torch.where(real, positions, 0)
    if not tokens:
        return x.new_zeros([len(positions) if d == dim else n for d, n in enumerate(x.shape)])
    part = x.index_select(dim, index)
    return part * real.view([-1 if d == dim else 1 for d in range(x.dim())]).to(x.dtype)


class Mine:
    """A call on this rank: its tensors, its answer."""

    def __init__(self, case: Case, call: Call, rank: int, group):
        self.case, self.call, self.group = case, call, group
        if case.one_device:
            self.what, places = make_mask(call.mask, call), [torch.arange(call.tokens)]
        else:
            self.what, places = make_plan(call, case.world)
        self.places = places[rank]
        assert sorted(p for part in places for p in part.tolist() if p < call.tokens) == list(range(call.tokens))
        self.expected, self.rank = Expected(case, call), rank

    def forward(self):
        call, dtype = self.call, getattr(torch, self.call.dtype)
        leaves, extras, upstream = self.expected.drawn
        needs = self.call.needs[self.rank % len(self.call.needs)]
        dims = {name: dim for name, (_, dim) in leaf_shapes(call).items()}
        self.leaves = {name: shard(x.to(dtype), self.places, dims[name], call.tokens) for name, x in leaves.items()}
        for need, leaf in zip(needs, self.leaves.values(), strict=False):
            leaf.requires_grad_(need or (len(call.needs) > 1 and len(self.leaves) < 3))  # none at all, then everywhere
        self.extras = {name: x.to(dtype, copy=True).requires_grad_(call.seed % 4 > 0) for name, x in extras.items()}
        q_k_v = cut(call, self.leaves)
        self.out, self.lse = compute(self.case, call, self.what, self.group, q_k_v, self.extras)
        parts = [shard(upstream[name], self.places, 2, call.tokens) for name in ("out", "lse")]
        self.losses = losses(call, self.case, self.out, self.lse, *parts)

    def needs_backward(self):
        if not any(loss.requires_grad for loss in self.losses) and not self.call.tokens:
            return False  # no pair, so no score function was called, and none of its tensors are known
        return any(x.requires_grad for x in (*self.leaves.values(), *self.extras.values()))

    def compare(self) -> dict[str, str]:
        """What is wrong: the name of a tensor, and how."""
        call, expected, wrong = self.call, self.expected, {}
        truth = shard(expected.out, self.places, 2, call.tokens)
        self._check(wrong, "out", self.out, truth)
        real = self.places < call.tokens
        lse, mine = expected.lse[:, :, self.places[real]], self.lse.detach().double()[:, :, real]
        if not torch.equal(lse.isneginf(), mine.isneginf()):
            wrong["lse"] = "another set of rows sees nothing"
        self._check(wrong, "lse", mine.masked_fill(mine.isneginf(), 0.0), lse.masked_fill(lse.isneginf(), 0.0))
        dims = {name: dim for name, (_, dim) in leaf_shapes(call).items()}
        for name, leaf in self.leaves.items():
            if leaf.requires_grad:
                self._check(wrong, name, leaf.grad, shard(expected.grads[name], self.places, dims[name], call.tokens))
        for name, extra in self.extras.items():
            if extra.requires_grad:
                found = extra.grad
                if call.captured_grads == "share" and self.group is not None:
                    found = torch.zeros(extra.shape, dtype=torch.float64) if found is None else found.double()
                    dist.all_reduce(found, group=self.group)
                self._check(wrong, name, found, expected.grads[name])
        return wrong

    def _check(self, wrong, name, found, truth):
        limit = self.expected.limits[name]
        if found is None:
            if truth.numel() and float(truth.abs().max()) > limit:
                wrong[name] = "there is no gradient"
            return
        found = found.detach().double()
        if found.shape != truth.shape:
            wrong[name] = f"shape {tuple(found.shape)} instead of {tuple(truth.shape)}"
            return
        error = float((found - truth).abs().max()) if truth.numel() else 0.0
        if not error <= limit:
            wrong[name] = f"off by {error:.1e}, limit {limit:.1e}"


def run(case: Case, rank: int, group) -> tuple[str, str]:
    """(outcome, detail) on this rank: right, wrong, refused (by Longspan, with a message) or raised (anything else)."""
    try:
        mine = [Mine(case, call, rank, group) for call in case.calls]
        for each in mine:
            each.forward()
        passes = [mine[number] for number in case.order if mine[number].needs_backward()]
        if case.losses == "sum" and passes:
            sum(loss for each in passes for loss in each.losses).backward()
        elif passes:
            for each in passes:
                for number, loss in enumerate(each.losses, 1):
                    loss.backward(retain_graph=number < len(each.losses))
        wrong = {f"call {n}: {name}": how for n, each in enumerate(mine) for name, how in each.compare().items()}
    except ls.LongspanError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception:
        return "raised", traceback.format_exc()[-2000:]
    finally:
        if any(call.compiled for call in case.calls):
            torch._dynamo.reset()
    return ("wrong", "; ".join(f"{name} {how}" for name, how in wrong.items())) if wrong else ("right", "")


def repeat(case: Case) -> int:
    """Runs a case alone, under torchrun or plain Python, and says what came out. The status of the process."""
    rank, group = 0, None
    torch.set_num_threads(1)
    if not case.one_device:
        if case.world > 1:
            dist.init_process_group("gloo")
        else:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        rank, group = dist.get_rank(), dist.group.WORLD
    outcome, detail = run(case, rank, group)
    print(f"rank {rank}: {outcome} {detail}", flush=True)
    if group is not None:
        dist.destroy_process_group()
    return int(outcome not in ("right", "refused"))


_planted = {""}


def on_a_rank(case: Case, planted: str = "") -> tuple[str, str]:
    """For a pool of ranks; `planted` is code that breaks Longspan in this process for good."""
    logging.disable(logging.CRITICAL)  # a compiler that fails says so at length; the error is in the answer
    if planted not in _planted:
        _planted.add(planted)
        exec(planted, {})
    return run(case, dist.get_rank(), None if case.one_device else dist.group.WORLD)
