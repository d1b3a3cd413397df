"""Kernels of flash-linear-attention and mamba_ssm by Triton's interpreter, on CPUs. Prints one line of JSON a case.

    TRITON_INTERPRET=1 python -m tests.kernel_models.scan_script fla|mamba_ssm [CASE ...]

Neither package was made for this; what they need is put in their way here, and nowhere in the package.
"""

import builtins
import importlib
import json
import random
import sys
import types
from contextlib import nullcontext
from importlib.util import find_spec

import torch
from triton.runtime import autotuner

from longspan.mixers.scan_kernels import scan_kernel_named
from longspan.mixers.scan_reference import Segments
from tests.scan_cases import distance, like_output, random_states, random_work, results, widened

CASES = {  # kind, (key heads, heads for each, K, V), segments, slots, batch rows
    "fla": {
        "gated_delta": ("gated_delta", (1, 2, 16, 16), [(0, 70, 90), (0, 0, 67)], 96, 1),
        "gated_delta rows": ("gated_delta", (1, 1, 16, 32), [(1, 0, 20), (0, 3, 24), (0, 0, 2)], 24, 2),
        "kda": ("kda", (1, 1, 16, 16), [(0, 40, 60), (0, 0, 33)], 64, 1),
        "linear_attention": ("linear_attention", (1, 2, 16, 16), [(0, 70, 90), (0, 0, 67)], 96, 1),
        "gla": ("gla", (1, 1, 16, 16), [(0, 40, 60), (0, 0, 33)], 64, 1),
    },
    "mamba_ssm": {
        "ssd": ("ssd", (1, 2, 16, 16), [(0, 20, 48)], 48, 1),
        "ssd rows": ("ssd", (2, 1, 16, 16), [(1, 0, 20), (0, 3, 24), (0, 0, 2)], 24, 2),
    },
}


class Number(int):
    """A loop's variable is a tensor in compiled kernels, and an int in interpreted ones."""

    def to(self, dtype):
        return self


def make_interpretable(package):
    """No device to time on, so the first configuration; no GPU to ask, and no compiled library to load."""
    autotuner.Autotuner._bench = lambda self, *args, config, **meta: [1.0, 1.0, 1.0]
    if package == "fla":
        for name in ("gated_delta_rule", "kda", "simple_gla", "gla"):
            importlib.import_module(f"fla.ops.{name}")
        for name in [name for name in sys.modules if name.startswith("fla.ops.")]:
            sys.modules[name].range = lambda *ends: [Number(at) for at in builtins.range(*map(int, ends))]
    else:
        torch.cuda.device = lambda *_: nullcontext()
        torch.cuda.get_device_properties = lambda *_: types.SimpleNamespace(multi_processor_count=2)
        bare = types.ModuleType("mamba_ssm")  # without __init__.py, which loads a compiled library
        bare.__path__ = list(find_spec("mamba_ssm").submodule_search_locations)
        sys.modules["mamba_ssm"] = bare


def compared(kernel, kind, sizes, table, slots, batch):
    """Distances of a kernel's results to those of the reference in float64, and of the reference's own in float32."""
    torch.manual_seed(0)
    segments = Segments(torch.tensor(table).numpy())
    work = random_work(kind, random.Random(0), segments, torch.float32, slots, batch, sizes, strength=0.05)
    states, reference, wide = random_states(work), scan_kernel_named("reference"), widened(work)
    upstream = torch.randn_like(like_output(work)), torch.randn_like(states)
    expected = results(reference.local, wide, states.double(), upstream)
    parts = ["out", "states", *(f"gradient {at}" for at in range(len(expected) - 2))]

    def distances(run):
        found = results(run, work, states, upstream)
        return {part: distance(*pair) for part, pair in zip(parts, zip(found, expected, strict=True), strict=True)}

    found = {"local": distances(kernel.local), "reference": distances(reference.local)}
    mine, other = kernel.summary(work), reference.summary(wide)
    found["summary"] = {name: distance(x.double(), y) for name, x, y in zip("MU", mine, other, strict=True)}
    return found


def main(package, *names):
    torch.set_num_threads(1)
    make_interpretable(package)
    kernel = scan_kernel_named(package)
    for name in names or CASES[package]:
        print(json.dumps({"case": name} | compared(kernel, *CASES[package][name])), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
