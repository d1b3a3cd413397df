"""Build the device's extension once per version of PyTorch and of its source, whichever process comes first.

Does not import torch: the form that takes the place of "cuda" has to be loaded before that.
"""

import fcntl
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sysconfig
import tempfile
from importlib.metadata import version
from pathlib import Path

NATIVE = Path(__file__).parent / "native"
NAME = "standin_device"
LIBRARIES = ("torch", "torch_cpu", "torch_python", "c10")
OPTIONS = ("-O1", "-std=c++20", "-fPIC", "-shared", "-fvisibility=hidden", f"-DTORCH_EXTENSION_NAME={NAME}")
TIMEOUT = 600.0


def missing_tool() -> str:
    """Why the device cannot be built here; empty if it can."""
    if shutil.which("g++") is None:
        return "no g++ to build the stand-in device with"
    if "+cpu" not in version("torch") and sysconfig.get_platform() != "linux-x86_64":
        return "the stand-in device is built for CPU builds of PyTorch"
    return ""


def torch_folder() -> Path:
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent


def _fingerprint() -> str:
    digest = hashlib.sha256(" ".join((version("torch"), sysconfig.get_platform(), *OPTIONS)).encode())
    for path in sorted(NATIVE.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _compile(target: Path) -> None:
    torch = torch_folder()
    folders = (torch / "include", torch / "include/torch/csrc/api/include", Path(sysconfig.get_paths()["include"]))
    unfinished = target.with_suffix(f".{os.getpid()}")  # renamed when complete: what was killed is never loaded
    command = ["g++", *OPTIONS, *(f"-I{folder}" for folder in folders), str(NATIVE / "device.cpp"), "-o"]
    command += [str(unfinished), f"-L{torch / 'lib'}", *(f"-l{name}" for name in LIBRARIES)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
        if done.returncode:
            raise RuntimeError(f"the stand-in device could not be built:\n{done.stderr[-4000:]}")
        unfinished.replace(target)
    finally:
        unfinished.unlink(missing_ok=True)


def build() -> Path:
    """The path of the extension, which is built here if no process has built it before.

    The lock is held by an open file (flock), so the kernel gives it up when its owner is killed.
    """
    folder = Path(tempfile.gettempdir()) / f"longspan-device-{os.getuid()}"
    folder.mkdir(exist_ok=True)
    target = folder / f"{NAME}-{_fingerprint()}.so"
    if not target.exists():
        with open(folder / "lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not target.exists():
                _compile(target)
    return target


def load():
    """The extension as a module."""
    spec = importlib.util.spec_from_file_location(NAME, build())
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
