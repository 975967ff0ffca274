"""The warm start and its cache: one entry for each set of inputs, whole or not there at all."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from conf.schema import TinyArchitecture, WarmStart
from tasks.engines import warm_start
from tasks.engines.tiny_model import create_model
from tasks.engines.warm_start import (
    Demonstration,
    WarmStartSpec,
    _repeatable,
    _train,
    cached_warm_start,
    pad_supervised,
)

SPEC = WarmStartSpec(
    architecture=TinyArchitecture(
        hidden_size=128, intermediate_size=128, num_hidden_layers=1, num_attention_heads=1, vocab_size=128
    ),
    training=WarmStart(steps=3, batch_size=4, learning_rate=1e-3, seed=0),
    demonstrations=tuple(Demonstration(f"{a} + {b} = ", str(a + b)) for a in range(3) for b in range(3)),
    threads=1,
)


@pytest.fixture(autouse=True)
def _same_threads_afterwards() -> Iterator[None]:
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _ignore(step: int, loss: float) -> None:
    pass


def _weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def _equal(a: Path, b: Path) -> bool:
    first, second = _weights(a), _weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def _entries(cache: Path) -> list[str]:
    """All that is in a cache but the locks of builds."""
    return [path.name for path in cache.iterdir() if path.suffix != ".lock"]


def test_a_second_run_takes_the_first_ones_model(tmp_path: Path) -> None:
    seen: list[tuple[int, float]] = []
    folder, cached = cached_warm_start(SPEC, tmp_path / "cache", lambda step, loss: seen.append((step, loss)))
    assert not cached
    assert folder == tmp_path / "cache" / SPEC.digest()
    assert [step for step, _ in seen] == [1, 2, 3]
    made = (folder / "model.safetensors").stat().st_mtime_ns
    again, cached = cached_warm_start(SPEC, tmp_path / "cache", lambda step, loss: pytest.fail("built again"))
    assert (again, cached) == (folder, True)
    assert (folder / "model.safetensors").stat().st_mtime_ns == made
    assert _entries(tmp_path / "cache") == [SPEC.digest()]


def test_the_same_inputs_give_the_same_weights(tmp_path: Path) -> None:
    first, _ = cached_warm_start(SPEC, tmp_path / "a", _ignore)
    torch.manual_seed(99)
    second, cached = cached_warm_start(SPEC, tmp_path / "b", _ignore)
    assert not cached and _equal(first, second)
    assert (first / "tokenizer.json").read_bytes() == (second / "tokenizer.json").read_bytes()


def test_training_teaches_and_no_training_leaves_the_seeded_start(tmp_path: Path) -> None:
    losses: list[float] = []
    longer = replace(SPEC, training=WarmStart(steps=60, batch_size=9, learning_rate=3e-3, seed=0))
    trained, _ = cached_warm_start(longer, tmp_path, lambda step, loss: losses.append(loss))
    untrained, _ = cached_warm_start(replace(SPEC, training=None), tmp_path, lambda *_: pytest.fail("trained"))
    assert losses[0] > 3.0 and losses[-1] < 1.5
    assert not _equal(trained, untrained)


CHANGES = {
    "architecture": replace(SPEC, architecture=SPEC.architecture.model_copy(update={"rope_theta": 999.0})),
    "steps": replace(SPEC, training=SPEC.training.model_copy(update={"steps": 4})),
    "batch size": replace(SPEC, training=SPEC.training.model_copy(update={"batch_size": 5})),
    "learning rate": replace(SPEC, training=SPEC.training.model_copy(update={"learning_rate": 2e-3})),
    "seed": replace(SPEC, training=SPEC.training.model_copy(update={"seed": 1})),
    "no training": replace(SPEC, training=None),
    "one demonstration less": replace(SPEC, demonstrations=SPEC.demonstrations[:-1]),
    "another order": replace(SPEC, demonstrations=SPEC.demonstrations[::-1]),
    "another answer": replace(SPEC, demonstrations=(*SPEC.demonstrations[:-1], Demonstration("2 + 2 = ", "5"))),
    "another prompt": replace(SPEC, demonstrations=(*SPEC.demonstrations[:-1], Demonstration("2+2 = ", "4"))),
    "text moved from prompt to answer": replace(
        SPEC, demonstrations=(*SPEC.demonstrations[:-1], Demonstration("2 + 2 =", " 4"))
    ),
    "threads": replace(SPEC, threads=2),
}


def test_the_digest_is_stable() -> None:
    copy = replace(SPEC, demonstrations=tuple(replace(d) for d in SPEC.demonstrations))
    assert copy.digest() == SPEC.digest()
    assert len(SPEC.digest()) == 64


def test_every_input_changes_the_digest() -> None:
    digests = {name: spec.digest() for name, spec in CHANGES.items()} | {"unchanged": SPEC.digest()}
    assert len(set(digests.values())) == len(digests)


@pytest.mark.parametrize("library", ["torch", "transformers", "tokenizers"])
def test_another_library_version_is_another_entry(monkeypatch: pytest.MonkeyPatch, library: str) -> None:
    before = SPEC.digest()
    monkeypatch.setattr(getattr(warm_start, library), "__version__", "0.0.1")
    assert SPEC.digest() != before


def test_another_procedure_is_another_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    before = SPEC.digest()
    monkeypatch.setattr(warm_start, "_RECIPE_VERSION", 10**6)
    assert SPEC.digest() != before


def test_a_cpus_entry_is_where_it_always_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody pays twice for a warm start because of what GPUs need."""
    for library, version in (("torch", "1"), ("transformers", "2"), ("tokenizers", "3")):
        monkeypatch.setattr(getattr(warm_start, library), "__version__", version)
    assert SPEC.digest() == "949932ff6bf07e0c268278b812265f14ecfc18ac8d13179afcdba8cb91d6183f"


def test_a_gpus_entry_is_its_kinds_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of the host do not shape it."""
    on_gpu, names = replace(SPEC, device="cuda"), iter(("H200", "H200", "H100", "H200"))
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: next(names))
    first, other_threads, other_kind = on_gpu.digest(), replace(on_gpu, threads=7).digest(), on_gpu.digest()
    monkeypatch.setattr("torch.version.cuda", "0.1")
    other_cuda = on_gpu.digest()
    assert first == other_threads
    assert len({SPEC.digest(), first, other_kind, other_cuda}) == 4


def test_what_trains_on_a_gpu_repeats_and_leaves_no_setting_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch raises for whatever has no kernel that repeats. No GPU is needed to look at the settings."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    training = SPEC.training
    assert training is not None
    pairs, losses = [([5, 6], [7, 1]), ([8], [9, 1])], []
    for device in ("cpu", "cuda", "cuda"):
        model = create_model(SPEC.architecture, 0, 1)
        with _repeatable(device):  # type: ignore[arg-type]
            assert torch.are_deterministic_algorithms_enabled() == (device == "cuda")
            assert torch.backends.cuda.flash_sdp_enabled() == (device == "cpu")
            seen: list[float] = []
            _train(model, pairs, training, lambda step, loss, seen=seen: seen.append(loss))  # type: ignore[misc]
        assert not torch.are_deterministic_algorithms_enabled() and torch.backends.cuda.flash_sdp_enabled()
        losses.append(seen)
    assert os.environ.pop("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    assert losses[1] == losses[2] == pytest.approx(losses[0], rel=1e-4)


def test_a_build_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def stop(step: int, loss: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cached_warm_start(SPEC, tmp_path, stop)
    assert _entries(tmp_path) == []
    folder, cached = cached_warm_start(SPEC, tmp_path, _ignore)
    assert not cached and _weights(folder)


def test_what_a_killed_build_left_is_never_used(tmp_path: Path) -> None:
    left = tmp_path / "building-half"
    left.mkdir()
    (left / "config.json").write_text("{}")
    folder, cached = cached_warm_start(SPEC, tmp_path, _ignore)
    assert not cached
    assert folder != left and (folder / "model.safetensors").is_file()


def test_a_disk_error_is_not_taken_for_a_lost_race(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(warm_start.os, "replace", full)
    with pytest.raises(OSError, match="No space left on device"):
        cached_warm_start(SPEC, tmp_path, _ignore)
    assert _entries(tmp_path) == []


def test_the_loser_of_a_race_takes_the_winners_folder(tmp_path: Path) -> None:
    """While this run builds, another finishes the same entry."""

    def other_finishes(step: int, loss: float) -> None:
        if step == 2:
            target = tmp_path / SPEC.digest()
            target.mkdir()
            (target / "model.safetensors").write_bytes(b"the winner's")

    folder, cached = cached_warm_start(SPEC, tmp_path, other_finishes)
    assert not cached
    assert (folder / "model.safetensors").read_bytes() == b"the winner's"
    assert _entries(tmp_path) == [SPEC.digest()]


def test_who_wants_what_another_is_making_waits_for_it(tmp_path: Path) -> None:
    begun, waits = threading.Event(), threading.Event()

    def first(step: int, loss: float) -> None:
        begun.set()
        assert waits.wait(60)

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(cached_warm_start, SPEC, tmp_path, first)
        assert begun.wait(60)
        two = pool.submit(cached_warm_start, SPEC, tmp_path, lambda step, loss: pytest.fail("built twice"))
        with pytest.raises(TimeoutError):
            two.result(timeout=0.2)
        waits.set()
        assert one.result() == (tmp_path / SPEC.digest(), False)
        assert two.result() == (tmp_path / SPEC.digest(), True)


def test_two_builds_at_the_same_time_end_with_one_whole_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk without locks; both are past their last step before either can put its folder in place."""
    monkeypatch.setattr(warm_start.fcntl, "flock", Mock(side_effect=OSError(errno.ENOLCK, "no locks")))
    cache, begun, meet = tmp_path / "cache", threading.Event(), threading.Barrier(2, timeout=60)

    def first(step: int, loss: float) -> None:
        begun.set()
        if step == 3:
            meet.wait()

    def second(step: int, loss: float) -> None:
        if step == 3:
            meet.wait()

    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(cached_warm_start, SPEC, cache, first)
        # Weights are drawn under the process-wide generator, so the second build begins after the first drew.
        assert begun.wait(60)
        two = pool.submit(cached_warm_start, SPEC, cache, second)
        assert one.result() == two.result() == (cache / SPEC.digest(), False)
    assert _entries(cache) == [SPEC.digest()]
    alone, _ = cached_warm_start(SPEC, tmp_path / "alone", _ignore)
    assert _equal(alone, cache / SPEC.digest())


RACER = """
import sys, time
from pathlib import Path
from unittest.mock import Mock
from tasks.engines.warm_start import cached_warm_start
from tests.unit.test_warm_start import SPEC

cache, me, other = Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
me.touch()
while not other.exists():
    time.sleep(0.01)
folder, _ = cached_warm_start(SPEC, cache, lambda step, loss: time.sleep(0.05))
print(folder)
"""


@pytest.mark.slow
def test_two_processes_that_race_end_with_one_whole_model(tmp_path: Path) -> None:
    cache, marks = tmp_path / "cache", [tmp_path / "a", tmp_path / "b"]
    root = Path(__file__).parents[2]
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(cache), *map(str, order)],
            cwd=root,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for order in (marks, marks[::-1])
    ]
    for racer in racers:
        out, err = racer.communicate(timeout=120)
        assert racer.returncode == 0, err
        assert out.strip() == str(cache / SPEC.digest())
    assert _entries(cache) == [SPEC.digest()]
    alone, _ = cached_warm_start(SPEC, tmp_path / "alone", _ignore)
    assert _equal(alone, cache / SPEC.digest())


def test_labels_stand_on_the_answer_alone() -> None:
    tokens, labels = pad_supervised([([5, 6, 7], [8, 1]), ([9], [2, 3, 1])])
    assert tokens.tolist() == [[5, 6, 7, 8, 1], [9, 2, 3, 1, 0]]
    assert labels.tolist() == [[-100, -100, -100, 8, 1], [-100, 2, 3, 1, -100]]


def test_a_damaged_entry_is_made_anew(tmp_path: Path) -> None:
    folder, cached = cached_warm_start(SPEC, tmp_path, _ignore)
    assert not cached
    path = folder / "model.safetensors"
    right = path.read_bytes()
    path.write_bytes(right[:-1] + bytes([right[-1] ^ 1]))
    again, cached = cached_warm_start(SPEC, tmp_path, _ignore)
    assert (again, cached) == (folder, False)
    assert path.read_bytes() == right
    assert cached_warm_start(SPEC, tmp_path, _ignore) == (folder, True)
