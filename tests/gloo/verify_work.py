"""What ranks do in the tests of verify: right integrations, and integrations with one mistake each.

A mistake is written the way people make it: with gathers, local calls and reductions around plain attention. Importable
by name, as worker processes need it.
"""

import contextlib
import copy
import io
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import longspan as ls
from longspan import masks
from longspan.scoring.pipeline import Dropout
from longspan.testing import allowed
from longspan.training import shard_batch, token_loss
from longspan.verification import verify, verify_model

SIZES = {"q_heads": 4, "kv_heads": 2, "head_dim": 8}
LENGTHS = [20, 5, 23, 16]
TOTAL = sum(LENGTHS)
PACKED = masks.documents(LENGTHS) & masks.causal()
MASKS = {
    "causal": masks.causal(TOTAL),
    "packed": PACKED,
    "window": masks.documents(LENGTHS) & masks.sliding_window(6),
    "window alone": masks.sliding_window(9, seq_len=TOTAL),
    "prefix": masks.prefix_lm([6, 1, 9, 4], LENGTHS),
    "bidirectional": masks.documents(LENGTHS),
    "per head": masks.per_head(PACKED, PACKED, masks.causal(TOTAL), masks.sliding_window(5, seq_len=TOTAL)),
    "empty rows": masks.documents(LENGTHS) & masks.sliding_window(6) & ~masks.documents([10, 54]),
}


class Case:
    """A plan over a group, and everything a broken call needs."""

    def __init__(self, mask="packed", layout="zigzag", scheme="ring", dtype="float32", **asked):
        self.group = dist.group.WORLD
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.mask = MASKS[mask]
        self.layout = getattr(ls.layouts, layout)(TOTAL, self.world)
        self.plan = ls.plan(self.mask, self.layout, scheme=scheme, dtype=dtype, **SIZES)
        self.pos = torch.as_tensor(self.layout.positions(self.rank))
        self.scale = SIZES["head_dim"] ** -0.5
        self.asked = asked

    def other(self, mask):
        """The same call with another mask."""
        plan = ls.plan(mask, self.layout, scheme="ring", dtype="float32", **SIZES)
        return lambda q, k, v: ls.attention(q, k, v, plan, group=self.group, **self.asked)

    def right(self, q, k, v, **changes):
        return ls.attention(q, k, v, self.plan, group=self.group, **{**self.asked, **changes})

    def joined(self, x):
        """Every rank's shard, end to end, with gradients."""
        return torch.cat(_Gather.apply(x), dim=2)

    def whole(self, x):
        """Every rank's shard, in the order of positions, with gradients."""
        return self.layout.unshard(_Gather.apply(x), dim=2)

    def seen(self, mask=None):
        return allowed(self.mask if mask is None else mask, 1, SIZES["q_heads"], TOTAL)

    def attend(self, q, k, v, seen, **options):
        """Plain attention of local queries with any keys."""
        nothing = ~seen.any(-1, keepdim=True)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | nothing, enable_gqa=True, **options)
        return out.masked_fill(nothing, 0.0)


def _gather(x):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return parts


class _Gather(torch.autograd.Function):
    """Every rank's shard (all of one length); gradients are added up over the ranks."""

    @staticmethod
    def forward(ctx, x):
        return tuple(_gather(x))

    @staticmethod
    def backward(ctx, *grads):
        total = torch.stack(grads)
        dist.all_reduce(total)
        return total[dist.get_rank()]


# -- attention calls with one mistake each -----------------------------------------------------------------------------


def right_call(case):
    return case.right


def gathered_call(case):
    """Right, by other means: gathers K/V and uses PyTorch's own attention."""
    return lambda q, k, v: case.attend(q, case.whole(k), case.whole(v), case.seen()[:, :, case.pos])


def causal_only(case):
    return case.other(masks.causal(TOTAL))


def no_mask(case):
    return case.other(masks.full(TOTAL))


def window_dropped(case):
    return case.other(PACKED)


def documents_leak(case):
    return case.other(masks.sliding_window(6, seq_len=TOTAL))


def future_seen(case):
    return case.other(masks.documents(LENGTHS))


def made_causal(case):
    return case.other(PACKED)


def own_shard(case):
    """The exchange never happens: PyTorch's attention on the shard, causal in local order."""
    return lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


def shard_order(case):
    """Gathered K/V stay in rank order, and the mask is that of global order."""
    return lambda q, k, v: case.attend(q, case.joined(k), case.joined(v), case.seen()[:, :, case.pos])


def local_mask(case):
    """is_causal on local rows: the first local row sees the first key only."""
    return lambda q, k, v: F.scaled_dot_product_attention(
        q, case.joined(k), case.joined(v), is_causal=True, enable_gqa=True
    )


def one_head_mask(case):
    return case.other(PACKED)


def local_scores(case):
    """A score function that sees the query's place in the shard, as PyTorch's flex attention under its own CP."""

    def call(q, k, v):
        slot = torch.arange(q.shape[2])
        bias = -0.3 * (slot[:, None] - torch.arange(TOTAL)).abs()
        seen = case.seen()[:, :, case.pos]
        bias = bias.masked_fill(~seen, -math.inf)
        return F.scaled_dot_product_attention(q, case.whole(k), case.whole(v), attn_mask=bias, enable_gqa=True)

    return call


def wrong_scale(case):
    return lambda q, k, v: case.right(q, k, v, scale=1.0)


def own_seed(case):
    return _dropped(case, case.asked["seed"] + case.rank)


def other_seed(case):
    return _dropped(case, case.asked["seed"] + 7919 * case.rank)


def _dropped(case, seed):
    """Dropout with a seed of its own; longspan.attention would refuse it."""
    index = torch.meshgrid(
        torch.zeros(1, dtype=torch.long), torch.arange(4), case.pos, torch.arange(TOTAL), indexing="ij"
    )
    factor = Dropout(case.asked["dropout"], seed).factor(*(i.contiguous() for i in index), torch.float32)

    def call(q, k, v):
        k, v = (case.whole(t).repeat_interleave(2, dim=1) for t in (k, v))
        scores = (case.scale * q @ k.mT).masked_fill(~case.seen()[:, :, case.pos], -math.inf)
        return (torch.softmax(scores, -1) * factor) @ v

    return call


def no_dropout(case):
    return lambda q, k, v: case.right(q, k, v, dropout=0.0, seed=None)


def no_sinks(case):
    return lambda q, k, v: case.right(q, k, v, sinks=None)


def no_softcap(case):
    return lambda q, k, v: case.right(q, k, v, softcap=None)


def no_captured_gradient(case):
    return lambda q, k, v: case.right(q, k, v, sinks=case.asked["sinks"].detach())


def own_share(case):
    """captured_grads="share" with nobody to add the shares up."""
    return lambda q, k, v: case.right(q, k, v, captured_grads="share")


class _SumAgain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.clone()
        dist.all_reduce(grad)
        return grad


def reduced_twice(case):
    return lambda q, k, v: case.right(q, k, v, sinks=_SumAgain.apply(case.asked["sinks"]))


class _LocalGradients(torch.autograd.Function):
    """Right forward; backward keeps the gradients of the rank's own keys only."""

    @staticmethod
    def forward(ctx, x, case):
        ctx.pos = case.pos
        return case.layout.unshard([part.contiguous() for part in _gather(x)], dim=2)

    @staticmethod
    def backward(ctx, grad):
        return grad[:, :, ctx.pos], None


def lost_gradients(case):
    def call(q, k, v):
        k, v = (_LocalGradients.apply(t, case) for t in (k, v))
        return case.attend(q, k, v, case.seen()[:, :, case.pos])

    return call


class _Stale(torch.autograd.Function):
    """Right forward; backward uses the K/V at hand, its own, for every block."""

    @staticmethod
    def forward(ctx, q, k, v, case):
        whole_k, whole_v = (case.layout.unshard(_gather(t), dim=2).repeat_interleave(2, dim=1) for t in (k, v))
        seen = case.seen()[:, :, case.pos]
        scores = (case.scale * q @ whole_k.mT).masked_fill(~seen, -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        out = torch.exp(scores - lse) @ whole_v
        ctx.case, ctx.seen = case, seen
        ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout):
        q, k, v, out, lse = ctx.saved_tensors
        case = ctx.case
        delta = (dout * out).sum(-1, keepdim=True)
        k, v = (t.repeat_interleave(2, dim=1) for t in (k, v))
        dq = torch.zeros_like(q)
        dkv = torch.zeros(2, 1, SIZES["kv_heads"], TOTAL, SIZES["head_dim"])
        for rank in range(case.world):
            at = torch.as_tensor(case.layout.positions(rank))
            p = torch.exp((case.scale * q @ k.mT).masked_fill(~ctx.seen[..., at], -math.inf) - lse)
            ds = case.scale * p * (dout @ v.mT - delta)
            dq += ds @ k
            for which, part in enumerate((ds.mT @ q, p.mT @ dout)):
                dkv[which][:, :, at] = part.unflatten(1, (-1, 2)).sum(2)
        dist.all_reduce(dkv)
        return dq, dkv[0][:, :, case.pos], dkv[1][:, :, case.pos], None


def stale_blocks(case):
    return lambda q, k, v: _Stale.apply(q, k, v, case)


def doubled_gradients(case):
    """Gradients of gathered K/V are reduced by the gather and once more by hand."""

    def call(q, k, v):
        return case.right(q, _SumTwice.apply(k), _SumTwice.apply(v))

    return call


class _SumTwice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad * dist.get_world_size()


def no_graph(case):
    return lambda q, k, v: case.right(q, k.detach(), v)


def other_order(case):
    """The output of whole attention, cut contiguously though the layout is another."""

    def call(q, k, v):
        out = case.attend(case.whole(q), case.whole(k), case.whole(v), case.seen())
        return ls.layouts.contiguous(TOTAL, case.world).shard(out, case.rank, dim=2)

    return call


def mean_of_blocks(case):
    """Blocks of keys, one per rank, averaged."""

    def call(q, k, v):
        total = torch.zeros_like(q)
        count = torch.zeros(1, SIZES["q_heads"], q.shape[2], 1)
        whole_k, whole_v = case.whole(k), case.whole(v)
        for rank in range(case.world):
            at = torch.as_tensor(case.layout.positions(rank))
            seen = case.seen()[:, :, case.pos][..., at]
            total = total + case.attend(q, whole_k[:, :, at], whole_v[:, :, at], seen)
            count = count + seen.any(-1, keepdim=True)
        return total / count

    return call


def wrong_heads(case):
    def call(q, k, v):
        k, v = (case.whole(t).repeat(1, 2, 1, 1) for t in (k, v))
        return case.attend(q, k, v, case.seen()[:, :, case.pos])

    return call


def swapped(case):
    return lambda q, k, v: case.right(q, v, k)


def values_of_another(case):
    """Values of remote blocks come from the next rank."""

    def call(q, k, v):
        parts = _Gather.apply(v)
        parts = [parts[r if r == case.rank else (r + 1) % case.world] for r in range(case.world)]
        return case.attend(q, case.whole(k), case.layout.unshard(parts, dim=2), case.seen()[:, :, case.pos])

    return call


def missing_hop(case):
    """The ring stops one hop early."""
    lost = (case.rank + 1) % case.world

    def call(q, k, v):
        seen = case.seen()[:, :, case.pos].clone()
        seen[..., torch.as_tensor(case.layout.positions(lost))] = False
        return case.attend(q, case.whole(k), case.whole(v), seen)

    return call


def nan_rows(case):
    """Rows that see nothing: 0 / 0."""

    def call(q, k, v):
        scores = case.scale * q @ case.whole(k).repeat_interleave(2, dim=1).mT
        scores = scores.masked_fill(~case.seen()[:, :, case.pos], -math.inf)
        return torch.softmax(scores, -1) @ case.whole(v).repeat_interleave(2, dim=1)

    return call


def narrow_statistics(case):
    """lse travels in bfloat16."""

    def call(q, k, v):
        k, v = (case.whole(t).repeat_interleave(2, dim=1) for t in (k, v))
        scores = (case.scale * q @ k.mT).masked_fill(~case.seen()[:, :, case.pos], -math.inf)
        lse = scores.logsumexp(-1, keepdim=True)
        return torch.exp(scores - (lse + (lse.bfloat16().float() - lse).detach())) @ v

    return call


def one_rank_only(case):
    """Only the last rank forgets the documents."""
    mask = case.mask if case.rank < case.world - 1 else masks.causal(TOTAL)
    return lambda q, k, v: case.attend(q, case.whole(k), case.whole(v), case.seen(mask)[:, :, case.pos])


def odd_rows(case):
    """Something that nobody could name, in the second half."""
    return lambda q, k, v: case.right(q, k, v) + 0.5 * (case.pos >= TOTAL // 2).view(-1, 1)


def one_lse(case):
    """Only rank 0 returns lse, of the right shape."""

    def call(q, k, v):
        out = case.right(q, k, v)
        return (out, torch.zeros(out.shape[:3])) if case.rank == 0 else out

    return call


def whole_output(case):
    return lambda q, k, v: case.attend(case.whole(q), case.whole(k), case.whole(v), case.seen())


def check_inputs(differ):
    """Inputs given by the user; `differ` gives rank 1 other values."""
    case = Case()
    torch.manual_seed(4)
    q, k, v = (torch.randn(1, h, TOTAL, 8) for h in (4, 2, 2))
    v = v + (case.rank if differ else 0)
    report = verify(case.right, (q, k, v), case.plan, group=case.group)
    return report.ok, report.findings, str(report)


def refused_on_ranks():
    plan = ls.plan(PACKED, ls.layouts.zigzag(TOTAL, 3), scheme="ring", dtype="float32", **SIZES)
    try:
        verify(lambda q, k, v: q, None, plan, group=dist.group.WORLD)
    except ls.PlanError as refused:
        return str(refused)
    return ""


def check_call(name, mask="packed", layout="zigzag", scheme="ring", dtype="float32", **asked):
    """The report of a call by name; `sinks=True` makes sinks that want a gradient."""
    if asked.get("sinks"):
        asked["sinks"] = torch.linspace(-1, 1, SIZES["q_heads"]).requires_grad_()
    case = Case(mask, layout, scheme, dtype, **asked)
    if case.asked.get("score_mod") == "distance":
        asked["score_mod"] = case.asked["score_mod"] = distance
    report = verify(globals()[name](case), None, case.plan, group=case.group, **asked)
    return report.ok, report.findings, str(report)


def distance(score, b, h, q_idx, kv_idx):
    return score - 0.3 * (q_idx - kv_idx).abs()


# -- training steps ----------------------------------------------------------------------------------------------------

VOCAB, DIM = 13, 16


class Model(torch.nn.Module):
    """Two layers; `attend` is the only part that knows about ranks."""

    def __init__(self):
        super().__init__()
        self.embed, self.place = torch.nn.Embedding(VOCAB, DIM), torch.nn.Embedding(TOTAL, DIM)
        self.qkv = torch.nn.ModuleList(torch.nn.Linear(DIM, 3 * DIM) for _ in range(2))
        self.mlp = torch.nn.ModuleList(torch.nn.Linear(DIM, DIM) for _ in range(2))
        self.sinks = torch.nn.Parameter(torch.linspace(-1, 1, 4))
        self.head = torch.nn.Linear(DIM, VOCAB)

    def forward(self, ids, positions, attend):
        x = self.embed(ids) + self.place(positions)
        for qkv, mlp in zip(self.qkv, self.mlp, strict=True):
            q, k, v = qkv(x).unflatten(-1, (3, 4, -1)).permute(2, 0, 3, 1, 4)
            x = x + torch.tanh(mlp(attend(q, k, v, self.sinks).transpose(1, 2).flatten(2)))
        return self.head(x)


def make_batch():
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCAB, (2, TOTAL), generator=draw)
    labels = ids.masked_fill(torch.rand(2, TOTAL, generator=draw) < 0.3, -100)
    positions = torch.cat([torch.arange(n) for n in LENGTHS]).expand(2, TOTAL)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def dense_sinks(q, k, v, sinks, seen):
    """Plain attention with a sink per head."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -math.inf)
    column = sinks.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1] @ v


def whole_step(model, batch, mask, attend=dense_sinks):
    """One device, in plain PyTorch."""
    seen = allowed(mask, 1, 1, TOTAL)
    logits = model(batch["input_ids"], batch["position_ids"], lambda q, k, v, s: attend(q, k, v, s, seen))
    targets = F.pad(batch["labels"][:, 1:], (0, 1), value=-100)
    targets = targets.masked_fill(F.pad(batch["position_ids"][:, 1:] == 0, (0, 1)), -100)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(wide.flatten(0, 1), targets.flatten()), logits


def no_sinks_step(model, batch, mask):
    def attend(q, k, v, sinks, seen):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=seen) + 0.0 * sinks.sum()

    return whole_step(model, batch, mask, attend)


class StepCase:
    """A right step, with one part replaced by a mistake."""

    def __init__(self, mistake, dtype="float32", layout="zigzag"):
        self.rank, self.world, self.mistake = dist.get_rank(), dist.get_world_size(), mistake
        self.layout = getattr(ls.layouts, layout)(TOTAL, self.world)
        other = {"documents": masks.causal(TOTAL), "both leak": masks.causal(TOTAL), "mask": masks.full(TOTAL)}
        mask = other.get(mistake, PACKED)
        sizes = {"q_heads": 4, "kv_heads": 4, "head_dim": DIM // 4, "batch": 2, "dtype": dtype}
        self.plan = ls.plan(mask, self.layout, scheme="exchange", **sizes)

    def attend(self, q, k, v, sinks):
        if self.mistake == "sinks":
            return ls.attention(q, k, v, self.plan, group=dist.group.WORLD) + 0.0 * sinks.sum()
        return ls.attention(q, k, v, self.plan, group=dist.group.WORLD, sinks=sinks, captured_grads="share")

    def labels(self, mine, batch):
        if self.mistake == "late":
            return F.pad(self.layout.shard(batch["labels"], self.rank, 1)[:, 1:], (0, 1), value=-100)
        if self.mistake == "unshifted":
            return self.layout.shard(batch["labels"], self.rank, 1)
        if self.mistake == "borders":
            return shard_batch(batch, self.layout, self.rank)["shift_labels"]
        return mine["shift_labels"]

    def __call__(self, model, batch):
        mine = shard_batch(batch, self.layout, self.rank, documents=LENGTHS)
        positions = mine["position_ids"]
        if self.mistake == "positions":
            positions = torch.arange(positions.shape[1]).expand_as(positions)
        logits = model(mine["input_ids"], positions, self.attend)
        labels = self.labels(mine, batch)
        if self.mistake == "own mean":
            return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten()), logits
        averaged = self.mistake in ("average", "fsdp")
        loss = token_loss(logits, labels, group=dist.group.WORLD, gradients="average" if averaged else "sum")
        if self.mistake == "times ranks":
            loss = loss * self.world
        elif self.mistake == "share":
            loss = loss / self.world
        return loss, logits


def _reduce(model, times):
    """Adds gradients up over the group as soon as they are there."""

    def hook(parameter):
        for _ in range(times):
            dist.all_reduce(parameter.grad)

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)


def check_step(mistake, gradients="sum", dtype="float32", layout="zigzag", with_logits=True):
    torch.manual_seed(0)
    model, batch = Model().to(getattr(torch, dtype)), make_batch()
    reference = copy.deepcopy(model)
    if mistake == "data":
        batch["input_ids"] = (batch["input_ids"] + dist.get_rank()) % VOCAB
    if mistake == "weights" and dist.get_rank():
        with torch.no_grad():
            model.mlp[1].bias += 1e-3
    if mistake in ("reduced", "summed twice"):
        _reduce(model, 1 if mistake == "reduced" else 2)
    if mistake == "fsdp":
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    step = StepCase(mistake, dtype, layout)
    local, whole = step, whole_step
    if mistake == "frozen":
        local = lambda m, b: step(_frozen(m), b)  # noqa: E731
    if mistake == "both leak":
        whole = lambda m, b, mask: whole_step(m, b, masks.causal(TOTAL))  # noqa: E731
    if not with_logits:
        local, whole = (lambda m, b: step(m, b)[0]), (lambda m, b, mask: whole_step(m, b, mask)[0])
    report = verify_model(
        model, batch, local=local, whole=whole, layout=step.layout, group=dist.group.WORLD, mask=PACKED,
        gradients=gradients, reference=reference, causes={"sinks dropped": no_sinks_step},
    )  # fmt: skip
    return report.ok, report.findings, str(report)


def _frozen(model):
    """The sinks are taken out of the graph on the ranks."""
    made = copy.copy(model)
    made._parameters = {**model._parameters, "sinks": torch.nn.Parameter(model.sinks.detach().clone())}
    return made


def run_block(code):
    """What a block of the documentation prints on this rank; the group is there already."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(code.replace('dist.init_process_group("gloo")', ""), {"__name__": "block"})
    return said.getvalue()
