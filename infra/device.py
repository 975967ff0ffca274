"""What the machine can compute: its accelerator, as far as drivers and torch tell."""

from __future__ import annotations

import importlib.util
import platform
from dataclasses import dataclass

import torch

_GB = 1e9


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


def gpu_count() -> int:
    """GPUs of this machine that torch sees; takes no memory on any of them, as `device_facts` does."""
    return torch.cuda.device_count()


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
    name = platform.processor() or platform.machine()
    return DeviceFacts(f"CPU ({name})", 0, None, None, memory.available / _GB, memory.total / _GB)


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
