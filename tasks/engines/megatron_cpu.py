"""Megatron Core on a machine without CUDA: what it asks of a CUDA device is answered by the CPU.

Megatron names the device "cuda" in many places. Here such requests give CPU tensors, streams and events do nothing,
and the random state of the device is PyTorch's own. This holds for the whole process and for the thread that installs
it: call `install` before a model is built, in a process that does nothing else.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from tasks.engines.megatron_private import check_version, complete_experts, use_random_state
from tasks.engines.protocols import EngineError

_CPU = torch.device("cpu")


def _is_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.partition(":")[0] == "cuda"


class _CudaIsCpu(TorchFunctionMode):
    """Functions of PyTorch as Megatron calls them; `Tensor.type()` says the names that its optimisers compare with."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if _is_cuda(kwargs.get("device")):
            kwargs["device"] = _CPU
        if func is torch.autograd.backward:
            # A mode is off while it answers, and layers that are computed again in the backward pass need it.
            with self:
                return _run_backward(*args, **kwargs)
        if func is torch.Tensor.cuda:
            return args[0]
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        if func is torch.Tensor.type and len(args) == 1 and not kwargs:
            return func(*args).replace("torch.", "torch.cuda.", 1)
        return func(*args, **kwargs)


def _run_backward(tensors: Any, grad_tensors: Any = None, retain_graph: bool | None = None, **_: Any) -> None:
    """`torch.autograd.backward` of one tensor or several, as Megatron calls it: to all leaves, once."""
    several = (tensors,) if torch.is_tensor(tensors) else tuple(tensors)
    given = (grad_tensors,) if grad_tensors is None or torch.is_tensor(grad_tensors) else tuple(grad_tensors)
    gradients = tuple(torch.ones_like(t) if g is None else g for t, g in zip(several, given, strict=True))
    engine: Any = torch.autograd.Variable._execution_engine
    engine.run_backward(several, gradients, bool(retain_graph), False, (), allow_unreachable=True, accumulate_grad=True)


class _NoStream:
    """A stream, or an event: on a CPU all work is done when a call returns."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def record_event(self, *_: Any) -> _NoStream:
        return self


def _current_device() -> torch.device:
    return _CPU


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_context(*_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    return contextlib.nullcontext()


def _get_state(*_: Any, **__: Any) -> torch.Tensor:
    return torch.get_rng_state()


def _set_state(state: torch.Tensor, *_: Any, **__: Any) -> None:
    torch.set_rng_state(state)


def installed() -> bool:
    """Whether `install` has been called in this process."""
    current: Any = torch.cuda.current_device
    return current is _current_device


def install() -> None:
    """Answer Megatron's requests for CUDA from now on. Idempotent.

    `EngineError` where there is CUDA, beside vLLM in one process, and for a Megatron that nobody has looked at.
    """
    if installed():
        return
    check_version()
    if torch.cuda.is_available():
        raise EngineError("this machine has CUDA: Megatron runs on it, and its stand-in for CPU is not installed")
    if "vllm" in sys.modules:
        raise EngineError("vLLM is loaded in this process; Megatron on CPU needs a process of its own")
    replaced = {
        "current_device": _current_device,
        "synchronize": _nothing,
        "empty_cache": _nothing,
        "current_stream": _NoStream,
        "default_stream": _NoStream,
        "stream": _no_context,
        "Stream": _NoStream,
        "Event": _NoStream,
        "get_rng_state": _get_state,
        "set_rng_state": _set_state,
        "manual_seed": torch.manual_seed,
    }
    for name, function in replaced.items():
        setattr(torch.cuda, name, function)
    use_random_state(_get_state, _set_state)
    complete_experts()
    _CudaIsCpu().__enter__()
