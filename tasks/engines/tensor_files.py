"""safetensors files written and read one tensor at a time, and checkpoints whose tensors lie in several of them.

The library's own `save_file` wants all tensors of a file in memory at once.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from tasks.engines.protocols import EngineError, TensorForm

_DTYPES: Final[Mapping[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
}
_NAMES: Final = {dtype: name for name, dtype in _DTYPES.items()}


def form_bytes(form: TensorForm) -> int:
    """Bytes of a tensor of this form."""
    return prod(form.shape) * form.dtype.itemsize


class TensorFileWriter:
    """A safetensors file whose tensors are known by form at once and come one by one, in any order.

    A context manager; `ValueError` at its end for tensors that never came, and in `put` for any that is not expected.
    """

    def __init__(self, path: Path, forms: Mapping[str, TensorForm], metadata: Mapping[str, str] | None = None) -> None:
        # Wide types first: every tensor then starts at a multiple of its element's size.
        order = sorted(forms, key=lambda name: (-forms[name].dtype.itemsize, name))
        header: dict[str, Any] = {} if metadata is None else {"__metadata__": dict(metadata)}
        offset = 0
        self._offsets: dict[str, int] = {}
        for name in order:
            form, end = forms[name], offset + form_bytes(forms[name])
            header[name] = {
                "dtype": _NAMES[form.dtype],
                "shape": list(form.shape),
                "data_offsets": [offset, end],
            }
            self._offsets[name], offset = offset, end
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        self._forms, self._missing = dict(forms), set(forms)
        self._file = path.open("wb")
        self._start = 8 + len(text)
        self._file.write(len(text).to_bytes(8, "little") + text)
        self._file.truncate(self._start + offset)

    def put(self, name: str, tensor: Tensor) -> None:
        """Write one tensor, from whatever device it is on."""
        form = TensorForm(tuple(tensor.shape), tensor.dtype)
        if name not in self._missing or form != self._forms[name]:
            raise ValueError(f"{name}: {form} is not expected in {self._file.name}, or came twice")
        self._missing.remove(name)
        self._file.seek(self._start + self._offsets[name])
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def __enter__(self) -> TensorFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._file.close()
        if kind is None and self._missing:
            raise ValueError(f"{self._file.name}: never came: {', '.join(sorted(self._missing)[:3])}")


class TensorFiles:
    """The tensors of several safetensors files, read when they are asked for. A context manager.

    `EngineError` names a tensor that is in two of the files.
    """

    def __init__(self, files: Iterable[Path]) -> None:
        self._stack = ExitStack()
        self._held: dict[str, Any] = {}
        self.forms: dict[str, TensorForm] = {}
        where: dict[str, Path] = {}
        try:
            for path in files:
                tensors = self._stack.enter_context(safe_open(path, "pt"))
                for name in tensors.keys():  # noqa: SIM118
                    if name in where:
                        raise EngineError(f"{name}: in two files of one checkpoint, {where[name]} and {path}")
                    part = tensors.get_slice(name)
                    where[name], self._held[name] = path, tensors
                    self.forms[name] = TensorForm(tuple(part.get_shape()), _dtype(part.get_dtype(), name, path))
        except BaseException:
            self._stack.close()
            raise

    def get(self, name: str) -> Tensor:
        """A tensor, whole."""
        tensor: Tensor = self._held[name].get_tensor(name)
        return tensor

    def part(self, name: str, dim: int, start: int, stop: int) -> Tensor:
        """A tensor's part along dimension 0 or 1; nothing else of it is read."""
        held = self._held[name].get_slice(name)
        if start == stop:
            form = self.forms[name]
            return torch.empty([0 if d == dim else n for d, n in enumerate(form.shape)], dtype=form.dtype)
        part: Tensor = held[start:stop] if dim == 0 else held[:, start:stop]
        return part

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _dtype(name: str, tensor: str, path: Path) -> torch.dtype:
    if name not in _DTYPES:
        raise EngineError(f"{path}: {tensor} is of type {name}; allowed: {', '.join(_DTYPES)}")
    return _DTYPES[name]


def rank_file(stem: str, rank: int, ranks: int) -> str:
    """Name of the file that one of the ranks writes: `weights.safetensors`, or `weights-00001-of-00002.safetensors`."""
    return f"{stem}.safetensors" if ranks == 1 else f"{stem}-{rank:05d}-of-{ranks:05d}.safetensors"


def rank_files(directory: Path, stem: str) -> tuple[Path, ...]:
    """The files that all ranks of one save wrote.

    `EngineError` where there are none, where one of them is missing, and where there are those of two saves.
    """
    pattern = re.compile(re.escape(stem) + r"(?:-(\d{5})-of-(\d{5}))?\.safetensors")
    matches = [match for path in directory.iterdir() if (match := pattern.fullmatch(path.name))]
    worlds = {int(match[2]) if match[2] else 1 for match in matches}
    if len(worlds) > 1:
        raise EngineError(
            f"{directory} holds {stem} files of {' and '.join(map(str, sorted(worlds)))} ranks: those of one save are "
            "allowed"
        )
    ranks = worlds.pop() if worlds else 1
    wanted = [directory / rank_file(stem, rank, ranks) for rank in range(ranks)]
    absent = [path.name for path in wanted if not path.is_file()]
    if absent:
        raise EngineError(f"{directory} is no checkpoint of this engine: it lacks {', '.join(absent)}")
    return tuple(wanted)
