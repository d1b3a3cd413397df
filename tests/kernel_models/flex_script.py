"""The flex kernel's generated code by Triton's interpreter, on CPU tensors, against `reference` in float64.

    TRITON_INTERPRET=1 python -m tests.kernel_models.flex_script FOLDER CASE[:MUTANT] ...

FOLDER is what `flex_code` filled. Prints a line of JSON for each case: relative errors by result. A mutant is one of
`MUTANTS`: a mistake that must show.
"""

import contextlib
import importlib.util
import inspect
import json
import re
import sys
import tempfile
import types
from pathlib import Path
from unittest import mock

import numpy as np
import torch

from longspan.kernels import flex
from longspan.kernels.contract import TileWork, Upstream
from longspan.kernels.reference import Reference
from longspan.run.merge import merge
from tests.kernel_models.flex_cases import CASES, Case


class Heuristics:
    """Stands in for what decides on a launch: remembers which kind it was."""

    def __getattr__(self, kind):
        return lambda *args, **given: lambda kernel: (kind, given, kernel)


def loaded(name: str, source: str):
    """A generated kernel as a module would have it: (kind of launch, what was said about it, kernel)."""
    source = source.replace("import triton_helpers, triton_heuristics", "import triton_helpers")
    source = source.replace("triton_helpers.set_driver_to_gpu()", "")
    begin = "from tests.kernel_models.flex_script import Heuristics\ntriton_heuristics = Heuristics()\n"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / f"{name}.py"
        path.write_text(begin + source)  # Triton reads the source of what it compiles
        spec = importlib.util.spec_from_file_location(f"generated_{name}", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found = getattr(module, name)
        inspect.getsource(found[2].fn)
    return found


def launcher(name: str, source: str, device_str: str = ""):
    """What the generated wrapper calls to launch a kernel."""
    import triton

    kind, given, kernel = loaded(name, source)
    kernel.fn.__globals__["libdevice"] = types.SimpleNamespace(tanh=interpreted_tanh)
    params = list(inspect.signature(kernel.fn).parameters)

    def run(*args, stream=None, **_):
        if kind == "template" or given.get("inductor_meta", {}).get("grid_type") == "FixedGrid":
            kernel[args[-3:]](*args[:-3])
            return
        sizes = {p: 16 if p == "XBLOCK" else 128 for p in params if p in ("XBLOCK", "R0_BLOCK", "RBLOCK")}
        named = dict(zip(params, args, strict=False))
        kernel[(triton.cdiv(named["xnumel"], sizes.get("XBLOCK", 1)), 1, 1)](*args, **sizes)

    return types.SimpleNamespace(run=run)


def interpreted_tanh(x, **_):
    """The interpreter has nothing of CUDA's own library of functions."""
    from triton.language.core import tensor
    from triton.runtime.interpreter import TensorHandle

    return tensor(TensorHandle(np.tanh(x.handle.data), x.handle.dtype), x.type)


def callable_code(code: str):
    """The generated wrapper, on CPU tensors; memory that it makes is full of NaN."""
    code = re.sub(
        r"^from torch\._C import _cuda_getCurrentRawStream as get_raw_stream$", "get_raw_stream = lambda d: 0", code,
        flags=re.M,
    )  # fmt: skip
    code = code.replace("async_compile = AsyncCompile()", "async_compile = LAUNCHER")
    code = re.sub(r"empty_strided_cuda = .*", "empty_strided_cuda = SPOILED", code)
    code = re.sub(r"with torch\.cuda\._DeviceGuard\(0\):", "if True:", code)
    code = re.sub(r"^\s*torch\.cuda\.set_device\(0\)$", "", code, flags=re.M)
    code = code.split("\ndef get_args")[0]

    def spoiled(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype).fill_(float("nan") if dtype.is_floating_point else 7)

    launches = types.SimpleNamespace(triton=launcher, wait=lambda space: None)
    space = {"LAUNCHER": launches, "SPOILED": spoiled}
    exec(compile(code, "generated wrapper", "exec"), space)
    return space["call"]


# -- mistakes that must show -------------------------------------------------------------------------------------------


def wrong_blocks(stack):
    """The first listed block of every row is the next one."""
    old = flex._list_blocks

    def changed(blocks):
        counts, order = old(blocks)
        return counts, order.roll(1, dims=-1)

    stack.enter_context(mock.patch.object(flex, "_list_blocks", changed))


def wrong_base(stack):
    """lse is taken to be natural."""
    stack.enter_context(mock.patch.object(flex, "LN2", 1.0))


def no_delta(stack):
    """Row sums are left out of backward."""
    old = flex.Flex.backward

    def changed(self, work, upstream):
        zero = torch.zeros_like(upstream.delta_BHQ)
        return old(self, work, Upstream(upstream.dout_BHQE, upstream.out_BHQE, upstream.lse_BHQ, zero))

    stack.enter_context(mock.patch.object(flex.Flex, "backward", changed))


def no_captured_gradient(stack):
    """What comes back for the last captured tensor is not added up."""
    old = flex.Program.captured_gradients
    changed = lambda self, found: list(old(self, found))[:-1]  # noqa: E731
    stack.enter_context(mock.patch.object(flex.Program, "captured_gradients", changed))


MUTANTS = {f.__name__: f for f in (wrong_blocks, wrong_base, no_delta, no_captured_gradient)}


# -- comparing ---------------------------------------------------------------------------------------------------------


def expected(case: Case, q, k, v, dout, *tables):
    """(out, lse, delta) and gradients by `reference` in float64."""
    q, k, v, dout, *tables = (t.double() for t in (q, k, v, dout, *tables))
    work, kernel = case.work(q, k, v, *tables), Reference()
    acc, top, num = (
        torch.zeros_like(dout),
        torch.full(q.shape[:3], -torch.inf).double(),
        torch.zeros(q.shape[:3]).double(),
    )
    for tile, (out, lse) in zip(case.tiles, kernel.forward(work), strict=True):
        rows = slice(tile.q0, tile.q1)
        merge(acc[:, :, rows], top[:, :, rows], num[:, :, rows], out.double(), lse.double())
    out, lse = acc / num.clamp(min=1e-300)[..., None], (top + num.log()).masked_fill(num == 0, -torch.inf)
    delta = (dout * out).sum(-1)
    sums = [torch.zeros_like(t) for t in (q, k, v)]
    for tile, parts in zip(case.tiles, kernel.backward(work, Upstream(dout, out, lse, delta)), strict=True):
        for total, part, at in zip(sums, parts, ("q", "k", "k"), strict=True):
            total[:, :, getattr(tile, f"{at}0") : getattr(tile, f"{at}1")] += part
    captured = () if work.pairs is None else work.pairs.totals.sums
    return out, lse, delta, sums, captured


def error(found, right) -> float:
    """Relative, by the root of the squares."""
    off = ((found.double() - right).norm() / right.norm()).item()
    return off if off == off else float("inf")


def compared(folder: Path, name: str, mutant: str) -> dict[str, float]:
    case = CASES[name]
    calls = iter([callable_code(code) for code in json.loads((folder / f"{name}.json").read_text())])
    q, k, v, dout, *tables = case.tensors()
    out, lse, delta, sums, captured = expected(case, q, k, v, dout, *tables)

    def run(key, graph, inputs):
        return next(calls)([x.detach() for x in inputs])

    with contextlib.ExitStack() as stack:
        if mutant:
            MUTANTS[mutant](stack)
        stack.enter_context(mock.patch.object(flex, "_run", run))
        flex._blocks_of.cache_clear()
        work: TileWork = case.work(q, k, v, *tables)
        ((cover,),) = flex.Flex().groups(work.tiles, case.q, case.k)
        ((found, found_lse),) = flex.Flex().forward(work)
        rows, keys = slice(cover.q0, cover.q1), slice(cover.k0, cover.k1)
        blind = lse[:, :, rows].isneginf()
        right = torch.equal(found_lse.isneginf(), blind) and not found[blind].any()
        errors = {"out": error(found, out[:, :, rows]), "blind": 0.0 if right else float("inf")}
        errors["lse"] = error(found_lse[~blind], lse[:, :, rows][~blind])
        upstream = Upstream(dout, out.to(case.dtype), lse.float(), delta.float())
        (grads,) = flex.Flex().backward(work, upstream)
        for label, grad, total, at in zip(("dq", "dk", "dv"), grads, sums, (rows, keys, keys), strict=True):
            errors[label] = error(grad, total[:, :, at])
        for number, (grad, total) in enumerate(
            zip(() if work.pairs is None else work.pairs.totals.sums, captured, strict=True)
        ):
            errors[f"captured {number}"] = error(grad, total)
        flex._blocks_of.cache_clear()
    return errors


def main(folder: str, *names: str) -> None:
    torch.set_num_threads(1)
    for name in names:
        case, _, mutant = name.partition(":")
        print(json.dumps(compared(Path(folder), case, mutant)), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
