"""The public functions of flash-linear-attention and mamba_ssm, as their documentation says what they do: token by
token, with their argument names, shapes and refusals. What our kernels make of them is tested without any GPU.

From fla-core 0.6.0 (fla/ops/{gated_delta_rule,kda,simple_gla,gla}/chunk.py) and mamba_ssm 2.3.2.post1
(ops/triton/ssd_combined.py at e9594ce1).
"""

from itertools import pairwise

import numpy as np
import torch

from longspan.mixers.scan_reference import GatedDelta, LinearAttention, ScanWork, Segments, Ssd
from tests.scan_oracle import recurrence_by_tokens


def _packed(recurrence, tokens, initial_state, cu_seqlens):
    assert all(len(x) == 1 for x in tokens), "cu_seqlens is for one batch row"
    assert initial_state.dtype == torch.float32
    assert len(initial_state) == len(cu_seqlens) - 1
    assert tokens[0].shape == tokens[1].shape
    edges = cu_seqlens.tolist()
    assert edges[-1] == tokens[0].shape[1]
    table = np.array([(0, a, b) for a, b in pairwise(edges)])
    out, after = recurrence_by_tokens(ScanWork(recurrence, tokens, (), Segments(table)), initial_state)
    return out.to(tokens[2].dtype), after.float()


def _delta(q, k, v, g, beta, *, scale, initial_state, output_final_state, cu_seqlens, use_qk_l2norm_in_kernel):
    assert output_final_state
    return _packed(GatedDelta(scale, use_qk_l2norm_in_kernel), (q, k, v, g, beta), initial_state, cu_seqlens)


def _linear(q, k, v, g, *, scale, initial_state, output_final_state, cu_seqlens):
    assert output_final_state
    assert q.shape[2] == k.shape[2] == v.shape[2], "keys are not shared between heads"
    return _packed(LinearAttention(scale), (q, k, v, g), initial_state, cu_seqlens)


def mamba_chunk_scan_combined(
    x, dt, A, B, C, chunk_size, D=None, initial_states=None, dt_limit=(0.0, float("inf")), return_final_states=False
):
    assert return_final_states
    assert chunk_size & (chunk_size - 1) == 0
    assert chunk_size >= 16
    table = np.array([(row, 0, x.shape[1]) for row in range(len(x))])
    work = ScanWork(Ssd(softplus=False, limits=dt_limit), (x, dt, B, C), (A, D, None), Segments(table))
    out, after = recurrence_by_tokens(work, initial_states.mT)
    return out.to(x.dtype), after.mT.float()


def ranked(function, rank):
    """A function that takes decays of so many dims only."""

    def checked(q, k, v, g, *rest, **options):
        assert g.ndim == rank
        return function(q, k, v, g, *rest, **options)

    return checked


FUNCTIONS = {
    ("fla.ops.gated_delta_rule", "chunk_gated_delta_rule"): ranked(_delta, 3),
    ("fla.ops.kda", "chunk_kda"): ranked(_delta, 4),
    ("fla.ops.simple_gla", "chunk_simple_gla"): ranked(_linear, 3),
    ("fla.ops.gla", "chunk_gla"): ranked(_linear, 4),
    ("mamba_ssm.ops.triton.ssd_combined", "mamba_chunk_scan_combined"): mamba_chunk_scan_combined,
}
KERNELS = dict.fromkeys(("gated_delta", "kda", "linear_attention", "gla"), "fla") | {"ssd": "mamba_ssm"}


def use_models(patch):
    """Our kernels call these functions instead of the packages'."""
    from longspan.mixers.scan_kernels import PackageScan

    patch.setattr(PackageScan, "function", lambda self, work: FUNCTIONS[self.address(work)])
