"""What a rank does in a fault case of recurrences: as in fault_work.py, with a scan for every call."""

import torch

import longspan as ls
from tests.gloo.fault_work import Rank

DIM = 8


class ScanRank(Rank):
    """One rank of a case; `plan` and `attention` are a recurrence's."""

    def plan(self, **changes):
        tokens = 16 * self.case.world
        layout = changes.pop("layout", ls.layouts.contiguous(tokens, self.case.world))
        documents = changes.pop("documents", None)
        asked = {"heads": 2, "keys": DIM, "values": DIM, "maps": "matrix", "scheme": self.case.scheme}
        return ls.scan_plan(documents, layout, **(asked | changes))

    def striking(self, direction):
        return direction

    def attention(self, plan, function=None, **options):
        kind = options.pop("kind", "delta")
        sizes, tokens = plan.sizes, int(plan.layout.num_tokens[self.rank])
        shape = (sizes.batch, tokens, sizes.heads, sizes.keys)
        dtype = getattr(torch, plan.dtype)
        q, k, v = (torch.randn(shape, dtype=dtype).requires_grad_(not options.get("frozen")) for _ in range(3))
        options.pop("frozen", None)
        where = {"plan": plan, "group": self.group}
        if function is not None or kind == "own":
            return ls.scan([k, v], **self._functions(function), state=(2, DIM, DIM), maps="matrix", **where)
        g = torch.zeros(*shape[:3], dtype=dtype)
        if kind == "linear":
            return ls.linear_attention(q, k, v, g, **options, **where)
        return ls.gated_delta_rule(q, k, v, g, g + 0.5, **options, **where)

    def _functions(self, direction):
        """S = S + k v^T, which strikes while others wait for its state, or for the gradient of one."""

        def local(k, v, state):
            state = state + torch.einsum("thk,thv->hkv", k, v)
            if direction == "backward":
                state.register_hook(lambda _: self.strike())
            return v + state.sum(), state

        def summary(k, v):
            if direction == "forward":
                self.strike()
            return torch.eye(DIM).expand(2, DIM, DIM), torch.einsum("thk,thv->hkv", k, v)

        return {"local": local, "summary": summary}

    def different(self):
        """The victim asks for something else, in a new plan."""
        import time

        self.pipe.send(("struck", time.time(), ""))
        tokens, world, odd = 16 * self.case.world, self.case.world, self.is_victim
        options, changes, name = {}, {"documents": [5, tokens - 5]}, self.case.settings["differs"]
        if name == "documents":
            changes = {"documents": [7 if odd else 8, tokens - (7 if odd else 8)]}
        elif name == "layout":
            changes |= {"layout": (ls.layouts.zigzag if odd else ls.layouts.contiguous)(tokens, world)}
        elif name == "scheme":
            changes |= {"scheme": "chain" if odd else "doubling"}
        elif name == "dtype":
            changes |= {"dtype": "float64" if odd else "float32"}
        elif name == "batch":
            changes |= {"batch": 2 if odd else 1}
        elif name == "scale":
            options = {"scale": 0.5 if odd else 0.125}
        elif name == "l2norm":
            options = {"l2norm": odd}
        elif name == "recurrence":  # the plan is the same, what is done with it is not
            options = {"kind": "own" if odd else "delta"}
        elif name == "gradients":
            options = {"frozen": odd}
        elif name == "one scale":  # the others repeat what was agreed before
            options, changes = ({"scale": 0.5} if odd else {}), {}
        elif name == "maps":
            changes |= {"maps": "scalar" if odd else "matrix"}
            options = {"kind": "linear" if odd else "delta"}
        out = self.attention(self.plan(**changes), **options)
        (out.sum() if out.requires_grad else out.sum().requires_grad_()).backward()

    def mixed(self):
        """The victim is in attention while the others are in a recurrence."""
        import time

        self.pipe.send(("struck", time.time(), ""))
        if self.is_victim:
            plan = Rank.plan(self, scheme="exchange")
            return Rank.attention(self, plan)
        return self.attention(self.plan(documents=[3, 16 * self.case.world - 3]))
