"""The flex kernel's generated code as machine code, without a GPU.

    python -m tests.kernel_models.flex_cubins CAPABILITY FILE ...

FILE is what `flex_code` wrote. Prints registers and shared memory of every kernel as JSON.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from tests.kernel_models.flex_script import loaded

SIZES = {"XBLOCK": 8}
KERNEL = re.compile(r"async_compile\.triton\('(\w+)', '''(.*?)'''", re.S)


def compiled(name: str, source: str, capability: int) -> dict[str, int]:
    _, given, kernel = loaded(name, source)
    meta = given["triton_meta"]
    names = kernel.arg_names
    signature = {n: meta["signature"].get(n, "constexpr") for n in names}
    known = {n: SIZES.get(n, 128) for n in names if signature[n] == "constexpr"} | dict(meta.get("constants", {}))
    constants = {(names.index(n),): value for n, value in known.items()}
    made = triton.compile(
        ASTSource(kernel, signature=signature, constexprs=constants, attrs=meta.get("configs", [{}])[0]),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": given.get("num_warps", 4), "num_stages": given.get("num_stages", 2)},
    )
    assert len(made.asm["cubin"]) > 0
    return {"registers": registers(made.asm["ptx"], capability), "shared": made.metadata.shared}


def registers(ptx: str, capability: int) -> int:
    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    ptxas = folder / ("ptxas-blackwell" if capability >= 90 else "ptxas")
    arch = re.search(r"\.target (\w+)", ptx)[1]
    with tempfile.TemporaryDirectory() as work:
        path = Path(work) / "kernel.ptx"
        path.write_text(ptx)
        command = [str(ptxas), "-v", f"--gpu-name={arch}", str(path), "-o", str(path.with_suffix(".cubin"))]
        told = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True).stderr
    return int(re.search(r"Used (\d+) registers", told)[1])


def main(capability: str, *files: str) -> None:
    found = {}
    for file in files:
        for direction, code in zip(("forward", "backward"), json.loads(Path(file).read_text()), strict=True):
            for name, source in KERNEL.findall(code):
                key = f"{Path(file).stem} {direction} {name}"
                found[key] = compiled(name, source, int(capability))
    print(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
