"""What a case is: plain values that print as the Python that makes them."""

from dataclasses import dataclass

DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Call:
    """One call of attention.

    `mask` and `layout` are nested tuples, as in ("and", ("causal",), ("documents", (3, 5))). `form` says how q, k and v
    are cut from the tensors that get gradients, `needs` which of these need one: one triple for all ranks, or one each.
    `scale` is None, a number, or ("tensor", number).
    """

    seed: int
    batch: int = 1
    q_heads: int = 1
    kv_heads: int = 1
    tokens: int = 8
    head_dim: int = 4
    v_head_dim: int = 4
    dtype: str = "float64"
    mask: tuple = ("causal",)
    layout: tuple = ("contiguous",)
    scheme: str = "auto"
    keep: bool = False
    scale: object = None
    spread: float = 1.0
    form: str = "plain"
    needs: tuple = ((True, True, True),)
    sinks: bool = False
    softcap: float | None = None
    alibi: bool = False
    bias: tuple | None = None
    score: str = ""
    lse: bool = False
    door: str = "attention"
    kernel: str = "auto"
    captured_grads: str = "sum"
    compiled: str = ""
    autocast: bool = False
    checkpoint: str = ""


@dataclass(frozen=True)
class Case:
    """Calls that are all made before the first backward pass; `order` is that of the backward passes.

    `losses` is "one" (a backward pass for each call), "two" (two for each, the first keeps the graph) or "sum" (one for
    all). `one_device` gives masks to attention, not plans and a group.
    """

    world: int
    calls: tuple[Call, ...]
    order: tuple[int, ...] = (0,)
    losses: str = "one"
    one_device: bool = False

    def features(self) -> set[str]:
        """Words for what this case is made of, to be counted."""
        found = {f"ranks {self.world}", f"losses {self.losses}", "several calls" if len(self.calls) > 1 else "one call"}
        found |= {"one device"} if self.one_device else set()
        for c in self.calls:
            found |= {f"dtype {c.dtype}", f"form {c.form}", f"door {c.door}", f"mask {c.mask[0]}"}
            found |= {f"layout {c.layout[0]}", f"scheme {c.scheme.partition('(')[0]}"} if not self.one_device else set()
            found |= {name for name in ("sinks", "softcap", "alibi", "lse", "keep", "autocast") if getattr(c, name)}
            found |= {f"score {c.score}"} if c.score else set()
            found |= {"bias"} if c.bias is not None else set()
            found |= {f"compiled {c.compiled}"} if c.compiled else set()
            found |= {f"checkpoint {c.checkpoint}"} if c.checkpoint else set()
            found |= {"needs differ"} if len(c.needs) > 1 else set()
            found |= {f"captured {c.captured_grads}"} if c.captured_grads != "sum" else set()
            found |= {"grouped heads"} if c.q_heads != c.kv_heads else set()
            found |= {f"scale {_kind_of_scale(c.scale)}"}
            found |= {"tokens < ranks"} if c.tokens < self.world else set()
            found |= {f"{name} 0" for name in ("tokens", "batch", "head_dim", "v_head_dim") if getattr(c, name) == 0}
        return found


def _kind_of_scale(scale) -> str:
    return "default" if scale is None else "tensor" if isinstance(scale, tuple) else "positive"
