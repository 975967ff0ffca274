"""The command `fp8-grpo prepare`: a pretrained model from a Python package as a folder that `model.path` can name."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from conf.problems import ConfigError
from conf.schema import Model
from flows.new_folder import check_free, new_folder
from tasks.engines.packaged_models import (
    PACKAGED,
    PackagedFileError,
    PackagedModel,
    PreparedFolder,
    load_gguf,
    packaged_file,
    write_prepared,
)


def prepare_model(model: Model, destination: Path | None = None, file: Path | None = None) -> PreparedFolder:
    """Write the model's weights, dequantised and zero-padded to FP8 blocks, to `destination` (None: `model.path`).

    `file` stands before the GGUF file of the package. `destination` is absent or empty and comes into being whole.
    `ConfigError` for a model that no package ships, a package that is not installed, a file that is not the package's,
    and a destination that is in use.
    """
    source = PACKAGED.get(model.name)
    if source is None:
        raise ConfigError([f"model = {model.name}: no package ships it; allowed: {', '.join(PACKAGED)}"])
    assert model.path is not None
    destination = (destination or Path(model.path)).absolute()
    check_free(destination)
    try:
        gguf = packaged_file(source, file)
    except PackagedFileError as error:
        raise ConfigError([f"model = {model.name}: {error}"]) from error
    with new_folder(destination) as staging:
        folder = staging / "folder"
        folder.mkdir()
        return write_prepared(*load_gguf(gguf), _origin(source), folder)


def _origin(source: PackagedModel) -> dict[str, str]:
    return {
        "package": source.package,
        "file": source.file,
        "sha256": source.sha256,
        "license": source.license,
        "transformers": importlib.metadata.version("transformers"),
    }
