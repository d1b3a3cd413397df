"""Run the layers that treat each token separately over a few tokens at a time, so that backward holds less.

Attention needs all tokens at once; MLPs and norms do not. With activation checkpointing, the largest tensors of a step
are those inside one layer: the intermediate rows of an MLP, and the float32 copies of norms. `tile` runs such a module
over runs of tokens and keeps only its input: each run is computed again in backward, where only one run's intermediate
rows exist at a time.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_MLPS = ("mlp", "feed_forward", "ffn", "moe", "block_sparse_moe")


def tile(model: nn.Module, chunks: int = 8, modules: Iterable[nn.Module] | None = None) -> list[str]:
    """Run MLPs and norms over `chunks` runs of tokens, each computed again in backward.

    Call it before `fully_shard` and `torch.compile`. Output and gradients of inputs are those of the whole module;
    gradients of parameters are sums over tokens in another order. The modules must treat each token separately, and
    must not change buffers, attributes or their input: they run tile by tile, and again in backward. So leave out
    norms over tokens (`GroupNorm`) and routers whose losses need all tokens at once.

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
