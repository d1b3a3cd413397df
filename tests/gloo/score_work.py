"""What ranks do in the Gloo tests of scores; importable by name, as worker processes need it."""

import numpy as np
import torch
import torch.distributed as dist

import longspan as ls
from tests.score_cases import MASKS, NAMES, SCHEMES, SCORES, Problem, any_layout, made_plan, masked, random_inputs
from tests.score_cases import relative_errors as errors_of


def random_problem(seed, world):
    """Problem and plan of a seed, the same on every rank."""
    draw, rng = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    tokens = int(rng.integers(22, 36))
    mask = masked(list(MASKS)[seed % len(MASKS)], tokens)
    score = SCORES[list(SCORES)[seed % len(SCORES)]](draw, tokens)
    layout = any_layout(rng, mask, tokens, world)
    plan = made_plan(mask, layout, SCHEMES[seed // 3 % 5], keep=bool(seed % 4 == 0))
    return Problem.of(score, mask, random_inputs(draw, tokens)), plan


def run_cases(seeds, world, captured_grads):
    """For each seed: what it was, the errors of this rank's rows by name, and what it found for all that learns."""
    rank, found = dist.get_rank(), []
    for seed in seeds:
        given, plan = random_problem(seed, world)
        layout, tokens = plan.layout, int(plan.layout.num_tokens[rank])
        own = [layout.shard(t, rank, 2).requires_grad_() for t in given.inputs[:3]]
        options = {"scale": given.scale, "return_lse": True, "captured_grads": captured_grads}
        out, lse = ls.attention(*own, plan, group=dist.group.WORLD, **options, **given.score.arguments)
        dout = layout.shard(given.inputs[3], rank, 2)
        gradients = torch.autograd.grad(out, (*own, *given.score.learned), dout)
        parts = [t[:, :, :tokens] for t in (out, lse, *gradients[:3])]
        answer = [layout.shard(t, rank, 2)[:, :, :tokens] for t in given.answer[:5]]
        nothing = layout.shard(given.nothing, rank, 2)[:, :, :tokens]
        errors = dict(zip(NAMES, errors_of(parts, answer, nothing), strict=True))
        found.append((f"{given.name}, {plan!r}", errors, [t.numpy() for t in gradients[3:]]))
    return found


def flex_context_parallel():
    """Outputs of PyTorch's context parallelism for FlexAttention and of ours, over the same contiguous shards.

    Forward only (there is no backward on CPUs), full attention: with it `block_mask` is not needed.
    """
    import warnings

    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental._context_parallel._attention import _ContextParallel
    from torch.distributed.tensor.parallel import parallelize_module
    from torch.nn.attention.flex_attention import flex_attention

    rank, world = dist.get_rank(), dist.get_world_size()
    tokens, heads, dim = 32, 2, 8
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, tokens, dim, generator=draw) for _ in range(3))

    class Attention(torch.nn.Module):
        def forward(self, query, key, value, score_mod):
            return flex_attention(query, key, value, score_mod=score_mod)

    def far(score, b, h, q, kv):
        return score - 0.02 * (q - kv) ** 2

    layout = ls.layouts.contiguous(tokens, world)
    plan = ls.plan(
        ls.masks.full(tokens), layout, q_heads=heads, kv_heads=heads, head_dim=dim, dtype="float32",
        scheme="all_gather",
    )  # fmt: skip
    own = [layout.shard(t, rank, 2) for t in (q, k, v)]
    module = parallelize_module(Attention(), mesh, _ContextParallel(2, _ContextParallel.AttentionType.FLEX))
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # it warns that it was not compiled
        theirs = module(*own, far)
        whole = flex_attention(q, k, v, score_mod=far)
        ours = ls.attention(*own, plan, group=mesh, score_mod=far)
    right = layout.shard(whole, rank, 2)
    return float((theirs - right).abs().max()), float((ours - right).abs().max())
