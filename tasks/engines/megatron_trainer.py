"""Building the Megatron trainer: what must hold before Megatron or Transformer Engine is imported."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from pathlib import Path

import torch

from conf.schema import MegatronTrainer, RunConfig
from tasks.engines.megatron_config import Layout, precision_arguments
from tasks.engines.protocols import EngineError, TrainerEngine

_SEED = 1


def layout_of(trainer: MegatronTrainer, rank: int = 0) -> Layout:
    """Where rank `rank` of the trainer's ranks stands; `EngineError` for one that there is not."""
    return Layout(
        tensor=trainer.tensor_parallel_size,
        pipeline=trainer.pipeline_parallel_size,
        context=trainer.context_parallel_size,
        expert=trainer.expert_parallel_size,
        data=trainer.data_parallel_size,
        rank=rank,
    )


def build(config: RunConfig, model_dir: Path, rank: int = 0, rendezvous: str | None = None) -> TrainerEngine:
    """The engine of rank `rank` of a run with `trainer=megatron`, in this process; a process for each rank.

    `rendezvous` of the ranks as PyTorch has it (`tcp://host:port`, `file:///path`), None for a single one. On a machine
    with several visible GPUs a rank takes the one of its number, counted anew on each machine.

    `ModuleNotFoundError` without Megatron Core; `EngineError` for what does not run here, and for variables of the
    environment that Transformer Engine has read with another value.
    """
    trainer, recipe = config.trainer, config.recipe
    assert isinstance(trainer, MegatronTrainer)
    on_gpu = trainer.device == "gpu"
    if on_gpu and not torch.cuda.is_available():
        raise EngineError("trainer.device = gpu: this machine has no CUDA; allowed: cpu, for tests")
    _prepare_environment(dict(precision_arguments(recipe, on_gpu).environment))
    if on_gpu:
        _one_cudnn()
    if trainer.deterministic:
        _repeat_bitwise()
    torch.set_num_threads(trainer.threads)
    layout = layout_of(trainer, rank)
    from tasks.engines import megatron_cpu

    if on_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())
    else:
        megatron_cpu.install()
    from tasks.engines.megatron_engine import MegatronSpec, MegatronTrainerEngine
    from tasks.engines.megatron_model import ensure_groups

    # No shorter than a phase may be: some ranks wait for others in a barrier, as after the parts of a checkpoint.
    ensure_groups(layout, on_gpu, rendezvous, config.deadlines.ranks_s, _SEED)
    return MegatronTrainerEngine(
        model_dir, MegatronSpec(recipe, config.algorithm, config.correction, trainer, config.rollout), layout
    )


def _repeat_bitwise() -> None:
    """Kernels from here on repeat their results; what has no such kernel is an error of PyTorch's."""
    os.environ |= {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    torch.use_deterministic_algorithms(True)


def _one_cudnn() -> None:
    """Have Transformer Engine use the cuDNN of torch's own package, where there is one and nobody chose another.

    By itself it takes the system's first. torch may have loaded part of its own by then, as in a warm start, and two
    versions refuse each other: an undefined symbol at import, or CUDNN_STATUS_SUBLIBRARY_LOADING_FAILED in attention.
    `EngineError` for a library of the package that does not load.
    """
    if os.environ.keys() & {"CUDNN_HOME", "CUDNN_PATH"}:
        return
    try:
        found = importlib.util.find_spec("nvidia.cudnn")
    except ModuleNotFoundError:
        return
    for folder in () if found is None else found.submodule_search_locations or ():
        for library in sorted(Path(folder).glob("lib/libcudnn*.so.*")):
            os.environ["CUDNN_HOME"] = folder
            try:
                # Whoever asks for a part by name gets this one from here on.
                ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
            except OSError as error:
                raise EngineError(f"trainer.device = gpu: cuDNN of torch's package does not load: {error}") from error


def _prepare_environment(wanted: dict[str, str]) -> None:
    for name, value in wanted.items():
        if "transformer_engine" in sys.modules and os.environ.get(name, "0") != value:
            raise EngineError(
                f"{name} = {os.environ.get(name)}: the recipe needs {value}, and Transformer Engine has been loaded in "
                "this process"
            )
        os.environ[name] = value
