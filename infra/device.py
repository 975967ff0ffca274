"""What the machine can compute: its accelerator, as far as drivers and torch tell."""

from __future__ import annotations

import importlib.util
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

_GB = 1e9
_ANSWER_S: Final = 20.0
_NVIDIA: Final = Path("/proc/driver/nvidia/gpus")
"""Has a folder for each GPU."""

_MEMORY_LIMITS: Final = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Of the control group of this process, of version 2 and 1, as a container sees its own."""


@dataclass(frozen=True)
class DeviceFacts:
    """`capability` (major, minor) of a GPU, None on CPU; memory in GB (1e9 bytes), of the GPU or of the host."""

    name: str
    count: int
    capability: tuple[int, int] | None
    cuda: str | None
    free_gb: float
    total_gb: float


@dataclass(frozen=True)
class Node:
    """CPU slots and GPUs that Ray hands out on a machine, taken or free."""

    cpus: float
    gpus: float


def gpu_count(driver: Path = _NVIDIA) -> int:
    """GPUs of this machine that this process may use; takes no memory on any of them, as `device_facts` does.

    Those that torch sees; with a build of torch for CPU, as a driver has whose actors run under another Python, those
    of NVIDIA's `driver` for Linux within CUDA_VISIBLE_DEVICES.
    """
    if torch.version.cuda is not None:
        return torch.cuda.device_count()
    present = len(list(driver.iterdir())) if driver.is_dir() else 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return present if visible is None else min(present, len([name for name in visible.split(",") if name.strip()]))


def gpu_memory() -> int | None:
    """Bytes of the smallest GPU that this process may use, as NVIDIA's driver tells; None where nothing tells.

    Asked of another program: torch would take memory on the GPU that it asks about.
    """
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible:
        # By number or by UUID, as the driver's program takes them, too.
        command.append(f"--id={visible}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ANSWER_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    sizes = [int(line) * 2**20 for line in done.stdout.split() if line.isdigit()]
    return min(sizes, default=None)


def device_name() -> str:
    """Name of the first GPU, or of the host's processor; takes no memory on a GPU."""
    if torch.cuda.is_available():
        return torch.cuda.get_device_name(0)
    return f"CPU ({platform.processor() or platform.machine()})"


def device_facts() -> DeviceFacts:
    """The first GPU, or the host's processor where there is none."""
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        free, total = torch.cuda.mem_get_info(0)
        return DeviceFacts(
            name=properties.name,
            count=torch.cuda.device_count(),
            capability=(properties.major, properties.minor),
            cuda=torch.version.cuda,
            free_gb=free / _GB,
            total_gb=total / _GB,
        )
    import psutil

    memory = psutil.virtual_memory()
    return DeviceFacts(device_name(), 0, None, None, memory.available / _GB, memory.total / _GB)


def host_memory(limits: Sequence[Path] = _MEMORY_LIMITS) -> int:
    """Bytes of the host's memory, or of its container where that has fewer."""
    import psutil

    found = [int(psutil.virtual_memory().total)]
    for path in limits:
        # A control group without a limit says "max", or a number beyond any memory.
        text = path.read_text().strip() if path.is_file() else "max"
        found += [int(text)] if text.isdigit() else []
    return min(found)


def cpu_flags() -> frozenset[str]:
    """Instruction sets of the host's processor as Linux names them; empty elsewhere."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as stream:
            for line in stream:
                if line.startswith("flags"):
                    return frozenset(line.split(":", 1)[1].split())
    except OSError:
        pass
    return frozenset()


def installed(module: str) -> bool:
    """Whether a module, dotted or not, can be found here; its parents are imported, itself it is not."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
