"""Run the layers that treat each token separately over a few tokens at a time, so that backward holds less.

Attention needs all tokens at once; MLPs and norms do not. With activation checkpointing, the largest tensors of a step
are those inside one layer: the intermediate rows of an MLP, and the float32 copies of norms. `tile` runs such a module
over runs of tokens and keeps only its input: each run is computed again in backward, where only one run's intermediate
rows exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_MLPS = ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe")
_PROBE = 67
"""Tokens for which a module is compared with itself on two parts of them; a prime, so that no stride fits into it."""


def tile(model: nn.Module, chunks: int = 8, modules: Iterable[nn.Module] | None = None) -> list[str]:
    """Run MLPs and norms over `chunks` runs of tokens, each computed again in backward.

    Call it before `fully_shard` and `torch.compile`. Output and gradients of inputs are those of the whole module;
    gradients of parameters are sums over tokens in another order. A module that mixes tokens is refused when it first
    runs, in `eval()` and in `train()`, as are routers whose losses need all tokens at once.

    Args:
        model: the model; its modules are changed in place.
        chunks: the number of runs.
        modules: the modules to tile, by default those of the model that are called `mlp`, `feed_forward`, `ffn`, `moe`
            or `block_sparse_moe`, and the norms of which the class is called `...Norm`.

    Returns:
        The names of the tiled modules.

    >>> model = nn.ModuleDict({"mlp": nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4))})
    >>> x = torch.randn(1, 10, 4)
    >>> whole = model["mlp"](x)
    >>> tile(model, 3), torch.allclose(model["mlp"](x), whole, atol=1e-6)
    (['mlp'], True)
    """
    if not isinstance(model, nn.Module):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise TypeError(f"`model` must be a torch.nn.Module, but got {type(model).__name__}.")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"`chunks` must be a positive integer, but got {chunks!r}.")
    wanted = None if modules is None else {id(module) for module in modules}
    selected: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        if wanted is not None:
            is_wanted = id(module) in wanted
        elif any(name.startswith(f"{outer}.") for outer in selected):
            is_wanted = False  # inside of one that is tiled
        else:
            is_wanted = name.rpartition(".")[2] in _MLPS or type(module).__name__.endswith("Norm")
        if is_wanted:
            selected[name] = module
    if not selected or (wanted is not None and len(selected) < len(wanted)):
        raise ValueError(
            f"`model` must have the modules to tile, but {len(selected)} of"
            f" {'any' if wanted is None else len(wanted)} are in {type(model).__name__}. Pass modules= from"
            f" model.modules(), such as [layer.mlp for layer in model.layers]."
        )
    for name, module in selected.items():
        if "forward" in vars(module):
            raise ValueError(
                f"{name} ({type(module).__name__}) must have the forward of its class, but it was replaced (by tile, an"
                f" offload hook or another package). Call tile once, before others change the model."
            )
        if any(isinstance(part, nn.Dropout) and part.p > 0 for part in module.modules()):
            raise ValueError(
                f"{name} ({type(module).__name__}) must have no dropout, since tiles would draw other numbers than the"
                f" whole. Set its dropout to 0, or leave it out: pass modules= to tile."
            )
    for name, module in selected.items():
        module.forward = partial(_forward, module, chunks, name, getattr(model, "config", None))
    return list(selected)


def _forward(module: nn.Module, chunks: int, name: str, config: Any, *args: Any, **kwargs: Any) -> Any:
    # The class's forward, not a bound one: a deep copy of the model must run with the copy's parameters.
    forward = partial(type(module).forward, module)
    if len(args) != 1 or kwargs or not isinstance(args[0], Tensor) or args[0].ndim < 2:
        raise TypeError(
            f"{name} ({type(module).__name__}) must be called with one tensor (..., tokens, features) to be tiled, but"
            f" got {len(args)} arguments and {sorted(kwargs)}. Leave it out: pass modules= to tile."
        )
    if getattr(config, "output_router_logits", False) and hasattr(module, "experts"):
        raise ValueError(
            f"{name} ({type(module).__name__}) must not be tiled with output_router_logits=True: a loss of the router"
            f" needs all tokens at once. Set it to False, or leave it out: pass modules= to tile."
        )
    hidden = args[0]
    dim = hidden.ndim - 2 if hidden.ndim < 4 else 1
    if getattr(module, "_longspan_checked", (0, 0))[module.training] < min(hidden.shape[dim], _PROBE):
        _check_tokens(module, forward, name, hidden, dim)
    # With several batch rows a piece has gaps, but modules of transformers `view` their input.
    pieces = [piece.contiguous() for piece in hidden.chunk(chunks, dim=dim)]
    if torch.is_grad_enabled():
        return _join([checkpoint(forward, piece, use_reentrant=False) for piece in pieces], pieces, dim)
    return _join([forward(piece) for piece in pieces], pieces, dim)


def _join(outputs: list[Any], pieces: list[Tensor], dim: int) -> Any:
    """Return the output of the whole from those of its pieces: a tensor, or a tuple of tensors, each with the leading
    dims of its piece, or with one dim for all of them (scores of a router)."""
    if isinstance(outputs[0], tuple):
        return tuple(_join(list(parts), pieces, dim) for parts in zip(*outputs, strict=True))
    leads = [piece.shape[: dim + 1] for piece in pieces]
    if all(out.shape[: dim + 1] == lead for out, lead in zip(outputs, leads, strict=True)):
        return torch.cat(outputs, dim=dim)
    rows = [out.unflatten(0, lead) for out, lead in zip(outputs, leads, strict=True)]
    return torch.cat(rows, dim=dim).flatten(0, dim)


def _check_tokens(module: nn.Module, forward: Callable[[Tensor], Any], name: str, hidden: Tensor, dim: int) -> None:
    """Raise if the module computes other rows for a few tokens than for two parts of them, or changes its buffers, its
    input or tensors in its attributes, since tiles run one after another, and twice.

    `_longspan_checked` has the numbers of tokens that were checked in `eval()` and in `train()`, where dropout and
    batch norms differ; a first call may have few tokens. A check in `train()` also counts for `eval()`.
    """
    if torch.compiler.is_compiling():
        raise RuntimeError(
            f"{name} ({type(module).__name__}) must run once before it is compiled, to check that it treats each token"
            f" separately. Call the model once, in train() if it is trained, on {_PROBE} tokens or more, before"
            f" torch.compile."
        )
    if hidden.shape[dim] < 2 or not hidden.numel():
        return  # checked by a later call
    buffers = dict(module.named_buffers())
    before = {key: buffer.clone() for key, buffer in buffers.items()}
    with torch.no_grad():
        few = hidden.detach().narrow(dim, 0, min(_PROBE, hidden.shape[dim])).contiguous()
        sizes = [few.shape[dim] // 2, few.shape[dim] - few.shape[dim] // 2]
        parts = [part.clone(memory_format=torch.contiguous_format) for part in few.split(sizes, dim=dim)]
        probe = few.clone()
        whole, attributes = forward(probe), [*_attributes(module)]  # what is cached in a first call may stay
        halves, others = [forward(part) for part in parts], [*_attributes(module)]
        changed = [key for key, old in before.items() if _differs(buffers[key], old)]
        for key, buffer in buffers.items():
            buffer.copy_(before[key])
    if _differs(probe, few):
        raise ValueError(
            f"{name} ({type(module).__name__}) must not change its input in place to be tiled. Leave it out: pass"
            f" modules= to tile."
        )
    if len(attributes) != len(others) or any(x is not y for x, y in zip(attributes, others, strict=True)):
        raise ValueError(
            f"{name} ({type(module).__name__}) must not keep tensors of a call in attributes to be tiled, such as a"
            f" loss of a router, since each tile replaces those of the tile before. Leave it out: pass modules= to"
            f" tile."
        )
    if changed:
        raise ValueError(
            f"{name} ({type(module).__name__}) must not change its buffers to be tiled, since each tile runs twice, but"
            f" it changes {changed[0]!r}. Leave it out: pass modules= to tile."
        )
    outs = whole if isinstance(whole, tuple) else (whole,)
    lead = few.shape[: dim + 1]
    for out in outs:
        if not isinstance(out, Tensor) or (out.shape[: dim + 1] != lead and out.shape[:1] != (lead.numel(),)):
            got = f"shape {tuple(out.shape)}" if isinstance(out, Tensor) else type(out).__name__
            raise TypeError(
                f"{name} ({type(module).__name__}) must return tensors with a row for each token to be tiled, but got"
                f" {got} for {tuple(few.shape)}. Leave it out: pass modules= to tile."
            )
    joined = _join(halves, parts, dim)
    for out, other in zip(outs, joined if isinstance(joined, tuple) else (joined,), strict=True):
        # Products of fewer rows may be summed in another order: far less than what another token's row would change.
        bar = out.abs().amax() * max(4 * torch.finfo(out.dtype).eps, 1e-4)
        if not bool(((other - out).abs() <= bar).all()):
            raise ValueError(
                f"{name} ({type(module).__name__}) must treat each token separately to be tiled, but it computes other"
                f" rows for {few.shape[dim]} tokens than for two parts of them. Leave it out: pass modules= to tile."
            )
    if _differs(few, few.narrow(dim, 0, 1).expand_as(few)):  # equal tokens show nothing, such as padding
        size, in_training = few.shape[dim], getattr(module, "_longspan_checked", (0, 0))[1]
        vars(module)["_longspan_checked"] = (size, size if module.training else in_training)


def _differs(new: Tensor, old: Tensor) -> bool:
    """Return whether there are other values than before; NaN stays NaN."""
    return bool(((new != old) & (new == new)).any())


def _attributes(module: nn.Module) -> Iterator[Tensor]:
    """Yield tensors that are attributes or buffers of a module and its submodules, also those in lists and dicts."""
    pending = [
        value
        for part in module.modules()
        for key, value in vars(part).items()
        if key not in ("_parameters", "_modules")
    ]
    while pending:
        value = pending.pop()
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, dict):
            pending += value.values()
        elif isinstance(value, list | tuple):
            pending += value
