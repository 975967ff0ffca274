"""A checkpoint's weights as a plain Hugging Face folder, beside the files that came with the model."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.engines.checkpoint_names import checkpoint_parameters
from tasks.engines.plan import folder_shape
from tasks.engines.protocols import EngineError, TensorForm
from tasks.engines.tensor_files import TensorFiles, TensorFileWriter, form_bytes

SHARD_BYTES = 5_000_000_000
"""Most bytes of a weight file; a larger tensor has one alone."""

_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"
_PRECISION, _PRECISION_KEYS = "bfloat16", ("dtype", "torch_dtype")
_WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.h5", "*.msgpack", "*.gguf", "*.index.json", "*.onnx")


@dataclass(frozen=True)
class WrittenFolder:
    """What `write_folder` wrote: tensors, their bytes, and names of the weight files."""

    tensors: int
    bytes: int
    files: tuple[str, ...]


def companions(model_dir: Path) -> tuple[Path, ...]:
    """Configuration, generation settings, tokenizer and whatever else lies beside a model's weights, sorted.

    `EngineError` for a folder without config.json.
    """
    if not (model_dir / _CONFIG).is_file():
        raise EngineError(f"{model_dir}: no config.json; allowed: the folder of a Hugging Face model")
    files = (path for path in sorted(model_dir.iterdir()) if path.is_file() and not path.name.startswith("."))
    return tuple(path for path in files if not any(path.match(pattern) for pattern in _WEIGHT_FILES))


def write_folder(
    weights: Sequence[Path], model_dir: Path, destination: Path, shard_bytes: int = SHARD_BYTES
) -> WrittenFolder:
    """Write the model of `weights` (files of a checkpoint, by Hugging Face names) to `destination`, a new folder.

    Weights are rounded to BF16, as the trainer computes with them, one at a time, and config.json says so.
    `EngineError` names a tensor that the model of `model_dir` does not have, or has in another shape.
    """
    others = companions(model_dir)
    with TensorFiles(weights) as tensors:
        wanted = {name: tuple(p.shape) for name, p in checkpoint_parameters(folder_shape(model_dir)).items()}
        _check(tensors.forms, wanted, model_dir)
        destination.mkdir()
        for path in others:
            shutil.copyfile(path, destination / path.name)
        (destination / _CONFIG).write_text(_in_bf16((model_dir / _CONFIG).read_text(encoding="utf-8")))
        forms = {name: TensorForm(shape, torch.bfloat16) for name, shape in wanted.items()}
        shards = _shards(forms, shard_bytes)
        names = _file_names(len(shards))
        for file, shard in zip(names, shards, strict=True):
            with TensorFileWriter(
                destination / file, {name: forms[name] for name in shard}, {"format": "pt"}
            ) as writer:
                for name in shard:
                    writer.put(name, tensors.get(name).to(torch.bfloat16))
    size = sum(map(form_bytes, forms.values()))
    if len(names) > 1:
        places = {name: file for file, shard in zip(names, shards, strict=True) for name in shard}
        index = {"metadata": {"total_size": size}, "weight_map": places}
        (destination / _INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
    return WrittenFolder(len(forms), size, names)


def _in_bf16(config: str) -> str:
    """The text of a config.json with BF16 as the precision of the model and of its parts.

    Its old key where there is none: every version of transformers reads that.
    """
    model: dict[str, Any] = {"torch_dtype": None} | json.loads(config)
    if "dtype" in model and model["torch_dtype"] is None:
        del model["torch_dtype"]
    for section in (model, *(part for part in model.values() if isinstance(part, dict))):
        section.update({key: _PRECISION for key in _PRECISION_KEYS if key in section})
    return json.dumps(model, indent=2) + "\n"


def _check(found: Mapping[str, TensorForm], wanted: Mapping[str, tuple[int, ...]], model_dir: Path) -> None:
    problems = [f"{name}: not in the checkpoint" for name in wanted if name not in found]
    problems += [f"{name}: not in the model" for name in found if name not in wanted]
    problems += [
        f"{name}: checkpoint {found[name].shape}, model {shape}"
        for name, shape in wanted.items()
        if name in found and found[name].shape != shape
    ]
    if problems:
        raise EngineError(f"the checkpoint is not of the model in {model_dir}: {'; '.join(problems[:5])}")


def _shards(forms: Mapping[str, TensorForm], limit: int) -> list[list[str]]:
    """Names for each file, in the order of the model."""
    found: list[list[str]] = []
    size = 0
    for name, form in forms.items():
        if not found or size + form_bytes(form) > limit:
            found.append([])
            size = 0
        found[-1].append(name)
        size += form_bytes(form)
    return found


def _file_names(count: int) -> tuple[str, ...]:
    if count == 1:
        return ("model.safetensors",)
    return tuple(f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1))
