"""What the lines ran on: devices and how they are linked, versions, and which flash attention is active."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess  # nosec B404  # nvidia-smi, with fixed words
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch.cuda import nccl

from longspan.cli.acceptance.lines import Site
from longspan.cli.launch import kernel_used
from longspan.formatting import bytes_text
from longspan.kernels.cuda_flash import implementation

SETTINGS = re.compile(r"(TORCH_)?NCCL_\w+|GLOO_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|OMP_NUM_THREADS")
PLAIN = re.compile(r"[\w:,.^=-]{1,40}")
"""Values of variables that are told; others may be paths or addresses."""


def facts(site: Site) -> dict[str, Any]:
    """Everything about the machine that a reader of the page needs, and nothing that tells whose it is."""
    ranks = site.ranks
    found: dict[str, Any] = {
        "ranks": f"{ranks.size} over {ranks.backend}, {ranks.local_size} a host",
        "device": _device(site),
        "kernel": _kernel(site),
        "versions": _versions(),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores,"
        f" threads of a rank: {torch.get_num_threads()}",
        "float32 products": torch.get_float32_matmul_precision(),
        "set": _settings(),
    }
    if site.is_gpu:
        found |= {"flash attention": implementation(), "driver": _driver(), "links": _links()}
    return found


def _device(site: Site) -> str:
    if not site.is_gpu:
        return "CPU"
    about = torch.cuda.get_device_properties(site.ranks.device)
    number = torch.cuda.device_count()
    return (
        f"{number} x {about.name}, compute capability {about.major}.{about.minor}, {about.multi_processor_count}"
        f" multiprocessors, {bytes_text(about.total_memory)}"
    )


def _kernel(site: Site) -> str:
    """What `auto` takes for bfloat16, and for float32."""
    device, sizes = site.ranks.device, site.sizes
    return ", ".join(f"{kernel_used(sizes, dtype, device)} for {dtype}" for dtype in ("bfloat16", "float32"))


def _versions() -> dict[str, str | None]:
    import longspan

    found: dict[str, str | None] = {"longspan": longspan.__version__, "python": platform.python_version()}
    for name in ("torch", "numpy", "triton"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    if torch.cuda.is_available():
        found["CUDA"] = torch.version.cuda
        found["NCCL"] = ".".join(map(str, nccl.version()))
        cudnn = torch.backends.cudnn.version()
        found["cuDNN"] = None if cudnn is None else str(cudnn)
    return found


def _settings() -> list[str]:
    """Variables that change how ranks talk; those with other than plain values by name alone."""
    named = [name for name in sorted(os.environ) if SETTINGS.fullmatch(name)]
    return [f"{name}={os.environ[name]}" if PLAIN.fullmatch(os.environ[name]) else name for name in named]


def _driver() -> str | None:
    lines = _asked("--query-gpu=driver_version", "--format=csv,noheader").split()
    return lines[0] if lines else None


def _links() -> str | None:
    """How GPUs of this host reach each other, as nvidia-smi says it, each kind with how many pairs have it."""
    return link_kinds(_asked("topo", "-m"))


def link_kinds(table: str) -> str | None:
    """The kinds of links in nvidia-smi's table, with how many pairs have each.

    >>> link_kinds("      GPU0  GPU1  GPU2  NIC0\\nGPU0   X    NV18  NV18  PIX\\nGPU1  NV18   X    SYS  PIX\\n")
    'NV18 3, SYS 1'
    """
    rows = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", table).splitlines()]
    number = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in (rows[0] if rows else ()))
    counts: dict[str, int] = {}
    for row in rows[1:]:
        for kind in row[1 : 1 + number] if row and re.fullmatch(r"GPU\d+", row[0]) else ():
            counts[kind] = counts.get(kind, 0) + (kind != "X")
    return ", ".join(f"{kind} {number}" for kind, number in sorted(counts.items()) if number) or None


def _asked(*words: str) -> str:
    """What nvidia-smi answers; nothing where there is none."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=20, check=False)  # noqa: S603  # nosec B603
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
