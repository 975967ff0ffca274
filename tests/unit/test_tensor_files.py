"""safetensors files written one tensor at a time, and checkpoints that lie in several of them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from tasks.engines.protocols import EngineError, TensorForm
from tasks.engines.tensor_files import TensorFiles, TensorFileWriter, rank_file, rank_files

TENSORS = {
    "codes": torch.arange(21, dtype=torch.uint8).view(torch.float8_e4m3fn).view(3, 7),
    "step": torch.tensor(3.0),
    "bf16": torch.randn(5, 3, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16),
    "scales": torch.tensor([120, 127], dtype=torch.uint8).view(torch.float8_e8m0fnu),
    "wide": torch.arange(4, dtype=torch.float64),
    "empty": torch.zeros(0, 4),
}


def _forms() -> dict[str, TensorForm]:
    return {name: TensorForm(tuple(t.shape), t.dtype) for name, t in TENSORS.items()}


def test_a_file_written_in_any_order_reads_back_bitwise(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    with TensorFileWriter(path, _forms(), {"format": "pt"}) as writer:
        for name in ("step", "wide", "codes", "empty", "scales", "bf16"):
            writer.put(name, TENSORS[name])
    found = load_file(path)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype and found[name].shape == tensor.shape
        assert found[name].reshape(-1).view(torch.uint8).tolist() == tensor.reshape(-1).view(torch.uint8).tolist()
    with safe_open(path, "pt") as opened:
        assert opened.metadata() == {"format": "pt"}
    with TensorFiles([path]) as files:
        assert files.forms == _forms()
        assert torch.equal(files.part("bf16", 1, 1, 3), TENSORS["bf16"][:, 1:])
        assert torch.equal(files.part("bf16", 0, 2, 3), TENSORS["bf16"][2:3])
        assert files.part("bf16", 0, 5, 5).shape == (0, 3)


def test_views_are_written_as_they_look(tmp_path: Path) -> None:
    tensor = torch.arange(12.0).view(3, 4)
    with TensorFileWriter(tmp_path / "a", {"a": TensorForm((4, 3), torch.float32)}) as writer:
        writer.put("a", tensor.t())
    assert torch.equal(load_file(tmp_path / "a")["a"], tensor.t())


def test_a_file_without_tensors_is_one(tmp_path: Path) -> None:
    with TensorFileWriter(tmp_path / "a", {}):
        pass
    assert load_file(tmp_path / "a") == {}


def test_a_writer_takes_what_it_expects_and_all_of_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="never came: codes"), TensorFileWriter(tmp_path / "a", _forms()) as writer:
        for name in TENSORS.keys() - {"codes"}:
            writer.put(name, TENSORS[name])
    for name, tensor in (("step", torch.ones(2)), ("other", torch.ones(2)), ("step", torch.tensor(1))):
        expected = pytest.raises(ValueError, match=f"{name}: .* is not expected")
        with expected, TensorFileWriter(tmp_path / "a", _forms()) as writer:
            writer.put(name, tensor)
    with pytest.raises(ValueError, match="came twice"), TensorFileWriter(tmp_path / "a", _forms()) as writer:
        writer.put("step", TENSORS["step"])
        writer.put("step", TENSORS["step"])


def test_names_of_files(tmp_path: Path) -> None:
    assert rank_file("weights", 0, 1) == "weights.safetensors"
    assert rank_file("weights", 1, 12) == "weights-00001-of-00012.safetensors"
    for rank in range(2):
        save_file({f"a{rank}": torch.ones(1)}, tmp_path / rank_file("weights", rank, 2))
    assert [path.name for path in rank_files(tmp_path, "weights")] == [rank_file("weights", r, 2) for r in range(2)]
    with pytest.raises(EngineError, match=r"is no checkpoint of this engine: it lacks optimizer\.safetensors"):
        rank_files(tmp_path, "optimizer")
    save_file({}, tmp_path / rank_file("weights", 2, 3))
    with pytest.raises(EngineError, match=r"holds weights files of 2 and 3 ranks"):
        rank_files(tmp_path, "weights")


def test_a_tensor_in_two_files_is_named_with_both(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("a", "b")]
    for path in paths:
        save_file({"same": torch.ones(1), path.name: torch.ones(1)}, path)
    with pytest.raises(EngineError, match=r"same: in two files of one checkpoint, .*/a and .*/b"):
        TensorFiles(paths)


def test_a_type_that_no_engine_writes_is_refused(tmp_path: Path) -> None:
    save_file({"a": torch.ones(1, dtype=torch.bool)}, tmp_path / "a")
    with pytest.raises(EngineError, match=r"a is of type BOOL; allowed: F64, F32, BF16"):
        TensorFiles([tmp_path / "a"])
