"""The facts at the top of the report: devices and their links, versions, settings, the active flash attention."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version

import torch
from torch.cuda import nccl

import longspan
from longspan.cli.launch import describe_kernel
from longspan.formatting import bytes_text
from longspan.kernels.cuda_flash import implementation
from tests.gpu.site import Site

SETTINGS = re.compile(r"(TORCH_)?NCCL_\w+|GLOO_\w+|CUDA_VISIBLE_DEVICES|CUDA_LAUNCH_BLOCKING|OMP_NUM_THREADS")
PACKAGES = (
    "torch", "numpy", "triton", "transformers", "accelerate", "flash-attn", "flash-attn-3", "flash-attn-4",
    "flash-linear-attention", "mamba-ssm", "causal-conv1d",
)  # fmt: skip
PLAIN_VALUE = re.compile(r"[\w:,.^=-]{1,40}")
"""Other values of variables may be paths or addresses, and are not shown."""


def facts(site: Site) -> dict[str, str | None]:
    """Return what a reader of the report needs to know about the machine, without host names, users and paths."""
    ranks = site.ranks
    kernels = [f"{describe_kernel(site.sizes, dtype, ranks.device)} for {dtype}" for dtype in ("bfloat16", "float32")]
    rows: dict[str, str | None] = {
        "ranks": f"{ranks.size} over {ranks.backend}, {ranks.local_size} a host",
        "device": "CPU",
        "kernel": ", ".join(kernels),
        "versions": ", ".join(f"{name} {number}" for name, number in _versions().items() if number),
        "host": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores,"
        f" threads of a rank: {torch.get_num_threads()}",
        "float32 products": torch.get_float32_matmul_precision(),
        "set": ", ".join(settings()),
    }
    if site.is_gpu:
        about = torch.cuda.get_device_properties(ranks.device)
        rows["device"] = (
            f"{torch.cuda.device_count()} x {about.name}, compute capability {about.major}.{about.minor},"
            f" {about.multi_processor_count} multiprocessors, {bytes_text(about.total_memory)}"
        )
        driver = _nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader").split()
        rows["flash attention"] = implementation()
        rows["driver"] = driver[0] if driver else None
        rows["links"] = link_kinds(_nvidia_smi("topo", "-m"))
    return rows


def _versions() -> dict[str, str | None]:
    versions: dict[str, str | None] = {"longspan": longspan.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            versions[name] = None
    if torch.cuda.is_available():
        versions["CUDA"] = torch.version.cuda
        versions["NCCL"] = ".".join(map(str, nccl.version()))
        cudnn = torch.backends.cudnn.version()
        versions["cuDNN"] = None if cudnn is None else str(cudnn)
    return versions


def settings() -> list[str]:
    """Return environment variables that change how ranks communicate, without values that may be private."""
    names = [name for name in sorted(os.environ) if SETTINGS.fullmatch(name)]
    return [f"{name}={os.environ[name]}" if PLAIN_VALUE.fullmatch(os.environ[name]) else name for name in names]


def link_kinds(table: str) -> str | None:
    """Return the kinds of links between GPUs in the table of `nvidia-smi topo -m`, with how many pairs have each.

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


def _nvidia_smi(*words: str) -> str:
    """Return the output of nvidia-smi, or an empty text where it is missing or fails."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ""
    try:
        done = subprocess.run([tool, *words], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout if done.returncode == 0 else ""
