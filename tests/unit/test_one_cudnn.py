"""Which cuDNN the trainer's process has before Transformer Engine is imported; a small C library plays its parts."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.engines import megatron_trainer
from tasks.engines.protocols import EngineError

ASK = """
import os
from tasks.engines import megatron_trainer
megatron_trainer._one_cudnn()
loaded = sorted({line.split()[-1] for line in open("/proc/self/maps") if "libcudnn" in line})
print(os.environ.get("CUDNN_HOME"), *loaded)
"""


def _package(place: Path) -> Path:
    """A folder for sys.path with `nvidia.cudnn` in it, as torch's wheels bring it."""
    libraries = place / "nvidia" / "cudnn" / "lib"
    libraries.mkdir(parents=True)
    source = place / "part.c"
    source.write_text("int part(void) { return 9; }\n")
    for name in ("libcudnn.so.9", "libcudnn_graph.so.9"):
        command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{name}", "-o", str(libraries / name), str(source)]
        subprocess.run(command, check=True)
    return libraries.parent


def _ask(monkeypatch: pytest.MonkeyPatch, place: Path, **variables: str) -> list[str]:
    """CUDNN_HOME and what a fresh process has loaded, where `place` comes first among its packages."""
    monkeypatch.delenv("CUDNN_HOME", raising=False)
    monkeypatch.delenv("CUDNN_PATH", raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PYTHONPATH", f"{place}:{Path(__file__).parents[2]}")
    return subprocess.run([sys.executable, "-c", ASK], check=True, capture_output=True, text=True).stdout.split()


needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler makes the libraries")


@needs_compiler
def test_every_part_comes_from_torchs_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = _package(tmp_path)
    parts = [str(package / "lib" / name) for name in ("libcudnn.so.9", "libcudnn_graph.so.9")]
    home, *loaded = _ask(monkeypatch, tmp_path)
    assert home == str(package) and set(parts) <= set(loaded)


@needs_compiler
def test_what_a_person_chose_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(tmp_path)
    assert _ask(monkeypatch, tmp_path, CUDNN_PATH="/opt/cudnn")[0] == "None"
    assert _ask(monkeypatch, tmp_path, CUDNN_HOME="/opt/cudnn")[0] == "/opt/cudnn"


def test_a_library_that_does_not_load_is_an_error_that_names_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "nvidia" / "cudnn" / "lib" / "libcudnn.so.9"
    broken.parent.mkdir(parents=True)
    broken.write_bytes(b"no library")

    class Found:
        submodule_search_locations = (str(broken.parents[1]),)

    monkeypatch.delenv("CUDNN_PATH", raising=False)
    # What the code below sets is undone with it.
    monkeypatch.setenv("CUDNN_HOME", "")
    monkeypatch.delenv("CUDNN_HOME")
    monkeypatch.setattr(megatron_trainer.importlib.util, "find_spec", lambda name: Found)
    with pytest.raises(EngineError, match=r"cuDNN of torch's package does not load: .*libcudnn\.so\.9"):
        megatron_trainer._one_cudnn()
