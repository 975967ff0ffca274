"""Reading a Hugging Face folder into a Megatron model, file by file and tensor by tensor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.engines.megatron_names import ModelShape, Shape, check_names, fuse, hf_shapes
from tasks.engines.protocols import EngineError

if TYPE_CHECKING:
    from tasks.engines.megatron_model import MegatronModel

_INDEX = "model.safetensors.index.json"
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


def checkpoint_files(folder: Path) -> tuple[Path, ...]:
    """The folder's weight files in the order of their names; `EngineError` where there are none, or one is missing."""
    index = folder / _INDEX
    if index.is_file():
        files = tuple(folder / name for name in sorted(set(json.loads(index.read_text())["weight_map"].values())))
    else:
        files = (folder / "model.safetensors",)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise EngineError(f"{folder}: no {', '.join(absent)}; allowed: a folder with *.safetensors")
    return files


@torch.no_grad()
def load_weights(model: MegatronModel, folder: Path) -> None:
    """Fill the rank's parameters from the folder, rounded to the model's dtype; see `read_parameters`."""
    parameters = dict(model.module.named_parameters())
    for name, tensor in read_parameters(model, folder):
        parameters[name].copy_(tensor)


def read_parameters(model: MegatronModel, folder: Path) -> Iterator[tuple[str, Tensor]]:
    """The rank's parameters from the folder, by Megatron's names, in the dtype of the files.

    Only the tensors of one parameter are held at a time. Every rank checks the names and shapes of the whole checkpoint
    before the first is given: `EngineError` names what is missing, unknown or of another shape.
    """
    shape, part, files = model.plan.shape, model.part, checkpoint_files(folder)
    check_checkpoint(shape, folder, files)
    wanted = {source: entry for entry in model.entries for source in entry.sources}
    held: dict[str, Tensor] = {}
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                entry = wanted.get(name)
                if entry is None:
                    continue
                held[name] = tensors.get_tensor(name)
                if all(source in held for source in entry.sources):
                    sources = [held.pop(source) for source in entry.sources]
                    yield entry.name, fuse(shape, entry, sources, part.tensor_rank, part.tensor_size)


def check_checkpoint(shape: ModelShape, folder: Path, files: tuple[Path, ...]) -> None:
    """`EngineError` unless the files hold exactly the model's tensors, each once.

    A tied head may be written too, where it equals the embedding.
    """
    found: dict[str, Shape] = {}
    with ExitStack() as stack:
        where: dict[str, Any] = {}
        for file in files:
            tensors = stack.enter_context(safe_open(file, "pt"))
            for name in tensors.keys():  # noqa: SIM118
                if name in found:
                    raise EngineError(f"{folder}: {name} is in more than one file")
                found[name], where[name] = tuple(tensors.get_slice(name).get_shape()), tensors
        if shape.tied and _HEAD in found and _EMBEDDING in found:
            if not torch.equal(where[_HEAD].get_tensor(_HEAD), where[_EMBEDDING].get_tensor(_EMBEDDING)):
                raise EngineError(
                    f"{folder}: {_HEAD} differs from {_EMBEDDING}, and config.json has tie_word_embeddings = true"
                )
            del found[_HEAD]
    check_names(found, hf_shapes(shape), str(folder))
