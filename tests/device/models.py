"""CUDA's fused attention operators on the form "cuda": the models by address of `kernel_models/`, run on streams.

Each operator allocates its results on the host and launches a kernel that computes them from the device's memory. The
models check what the real operators check; what they raise becomes a device error.
"""

from collections import Counter

import torch

from tests.device import forms
from tests.kernel_models import operators as models

used = Counter()
"""Calls of each operator."""
ROWS_OF_LSE = 32  # memory-efficient attention rounds lse rows up


def _launch(name, results, compute, *operands):
    """Enqueue `compute(*operands)`, whose tensors go into `results`."""
    used[name] += 1
    alias = forms.native.cpu_alias
    inputs = [None if x is None else alias(x) for x in operands]
    targets = [alias(x) for x in results]

    def kernel():
        with torch.no_grad():
            for target, value in zip(targets, compute(*inputs), strict=True):
                target.copy_(value)

    forms.native.launch(results[0].device.index, kernel)


def _random_state(like):
    return [torch.zeros((), dtype=torch.int64, device=like.device) for _ in range(2)]


def flash(
    q, k, v, starts_q, starts_k, longest_q, longest_k, dropout_p, is_causal, return_debug_mask,
    *, scale=None, window_size_left=None, window_size_right=None, **_,
):  # fmt: skip
    packed, longest, window = starts_q is not None, (longest_q, longest_k), (window_size_left, window_size_right)
    shape = (q.shape[1], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    out, lse = torch.empty_like(q), torch.empty(shape, device=q.device)
    _launch("flash", (out, lse), lambda *x: models.flash(*x, longest, window, scale), q, k, v, starts_q, starts_k)
    state = torch.zeros(2, dtype=torch.uint64, device=q.device)
    return out, lse, state, torch.zeros((), dtype=torch.uint64, device=q.device), torch.empty(0, device=q.device)


def flash_backward(
    dout, q, k, v, out, lse, starts_q, starts_k, longest_q, longest_k, dropout_p, is_causal, state, unused,
    *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    results = tuple(map(torch.empty_like, (q, k, v)))
    longest, window = (longest_q, longest_k), (window_size_left, window_size_right)
    operands = dout, q, k, v, out, lse, starts_q, starts_k
    _launch("flash backward", results, lambda *x: models.flash_backward(*x, longest, window, scale), *operands)
    return results


def efficient(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, *, scale=None):
    batch, heads, rows, _ = q.shape
    out = torch.empty(batch, rows, heads, v.shape[3], dtype=q.dtype, device=q.device).transpose(1, 2)
    lse = torch.empty(batch, heads, -(-rows // ROWS_OF_LSE) * ROWS_OF_LSE, device=q.device)
    _launch("efficient", (out, lse), lambda *x: models.efficient(*x, is_causal, scale), q, k, v, bias)
    return out, lse, *_random_state(q)


def efficient_backward(
    dout, q, k, v, bias, out, lse, seed, offset, dropout_p, needs_gradients, is_causal=False, *, scale=None
):
    results = tuple(map(torch.empty_like, (q, k, v)))
    operands = dout, q, k, v, out, lse, bias
    _launch("efficient backward", results, lambda *x: models.efficient_backward(*x, is_causal, scale), *operands)
    return *results, torch.empty(0, device=q.device)


def cudnn(q, k, v, bias, compute_lse, dropout_p=0.0, is_causal=False, return_debug_mask=False, *, scale=None):
    out, lse = torch.empty_like(q), torch.empty(*q.shape[:3], 1, device=q.device)
    _launch("cudnn", (out, lse), lambda *x: models.cudnn(*x, is_causal, scale), q, k, v, bias)
    nothing = torch.empty(0, device=q.device)
    return out, lse, nothing, nothing, q.shape[2], k.shape[2], *_random_state(q), nothing


def cudnn_backward(
    dout, q, k, v, out, lse, seed, offset, bias, starts_q, starts_k, longest_q, longest_k, dropout_p, is_causal,
    *, scale=None,
):  # fmt: skip
    results = tuple(map(torch.empty_like, (q, k, v)))
    operands = dout, q, k, v, out, lse, bias
    _launch("cudnn backward", results, lambda *x: models.cudnn_backward(*x, is_causal, scale), *operands)
    return results


OPERATORS = {
    "_flash_attention_forward": flash,
    "_flash_attention_backward": flash_backward,
    "_scaled_dot_product_efficient_attention": efficient,
    "_scaled_dot_product_efficient_attention_backward": efficient_backward,
    "_scaled_dot_product_cudnn_attention": cudnn,
    "_scaled_dot_product_cudnn_attention_backward": cudnn_backward,
}


def register():
    library = torch.library.Library("aten", "IMPL", "CUDA")
    for name, function in OPERATORS.items():
        library.impl(name, function)
    return library


_library = register() if forms.form == "cuda" else None
