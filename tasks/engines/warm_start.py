"""The supervised phase that gives a model built from scratch its first skill, cached by all that shaped it."""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import tokenizers
import torch
import transformers
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from conf.schema import TinyArchitecture, WarmStart
from tasks.engines.tiny_model import create_model, save_model, train_tokenizer

_RECIPE_VERSION = 1
"""Raised when the procedure below changes, so that no older cache entry is taken for its result."""

_IGNORED = -100
_SUMS = "sha256.json"
log = logging.getLogger(__name__)
_RAMP_STEPS = 30


Device = Literal["cpu", "cuda"]

GPU_ENVIRONMENT: Final[Mapping[str, str]] = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Variables without which products on a GPU do not repeat; read once by a process, at its first product."""


@dataclass(frozen=True)
class Demonstration:
    """One supervised example: the model learns to continue `prompt` with `answer` and the end token."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class WarmStartSpec:
    """Everything that shapes a warm start. `training` None: the untrained model.

    `device`: where it trains, in fp32 on either. A CPU's threads shape its sums, a GPU's kind does.
    """

    architecture: TinyArchitecture
    training: WarmStart | None
    demonstrations: tuple[Demonstration, ...]
    threads: int
    device: Device = "cpu"

    def digest(self) -> str:
        """SHA-256 over architecture, phase, every demonstration, library versions, and threads or the kind of GPU."""
        shaped_by = {
            "version": _RECIPE_VERSION,
            "architecture": self.architecture.model_dump(),
            "training": None if self.training is None else self.training.model_dump(),
            "demonstrations": [(d.prompt, d.answer) for d in self.demonstrations],
            "threads": self.threads,
            "libraries": [torch.__version__, transformers.__version__, tokenizers.__version__],
        }
        if self.device != "cpu":
            shaped_by |= {"threads": None, "device": [torch.cuda.get_device_name(), torch.version.cuda]}
        return hashlib.sha256(json.dumps(shaped_by, sort_keys=True).encode()).hexdigest()


def cached_warm_start(spec: WarmStartSpec, cache: Path, progress: Callable[[int, float], None]) -> tuple[Path, bool]:
    """Folder of the warm-started model under `cache`, made if it is missing; True when it was there already.

    A folder appears whole or not at all. Of runs that want the same one at once, one makes it and the others wait;
    where the disk has no locks all of them make it, and the first to finish wins.
    """
    target = cache / spec.digest()
    cache.mkdir(parents=True, exist_ok=True)
    with _one_at_a_time(cache / f"{target.name}.lock"):
        if target.is_dir():
            if _is_intact(target):
                return target, True
            log.warning("the cached warm start %s is damaged and is made anew", target)
            shutil.rmtree(target)
        _make(spec, target, cache, progress)
    return target, False


@contextmanager
def _one_at_a_time(path: Path) -> Iterator[None]:
    """Hold a lock that ends with this process, however that ends."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            log.warning("%s: no lock can be had here (%s); runs beside this one may do its work, too", path, error)
        yield


def _make(spec: WarmStartSpec, target: Path, cache: Path, progress: Callable[[int, float], None]) -> None:
    building = Path(tempfile.mkdtemp(prefix="building-", dir=cache))
    try:
        _build(spec, building, progress)
        (building / _SUMS).write_text(json.dumps(_sums(building)))
        os.replace(building, target)
    except OSError:
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _sums(folder: Path) -> dict[str, str]:
    """SHA-256 of each file by name."""
    files = sorted(path for path in folder.iterdir() if path.name != _SUMS)
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def _is_intact(folder: Path) -> bool:
    try:
        wanted = json.loads((folder / _SUMS).read_text())
    except (OSError, json.JSONDecodeError):
        return False
    return bool(wanted == _sums(folder))


def _build(spec: WarmStartSpec, directory: Path, progress: Callable[[int, float], None]) -> None:
    torch.set_num_threads(spec.threads)
    tokenizer = train_tokenizer([d.prompt for d in spec.demonstrations], spec.architecture.vocab_size)
    seed = 0 if spec.training is None else spec.training.seed
    model = create_model(spec.architecture, seed, int(tokenizer.eos_token_id))
    if spec.training is not None:
        encode = [
            (tokenizer.encode(d.prompt), [*tokenizer.encode(d.answer), int(tokenizer.eos_token_id)])
            for d in spec.demonstrations
        ]
        with _repeatable(spec.device):
            _train(model.to(torch.device(spec.device)), encode, spec.training, progress)
            model.to(torch.device("cpu"))
        if spec.device != "cpu":
            # The engines that come next measure what is free.
            torch.cuda.empty_cache()
    save_model(model, tokenizer, directory)


@contextmanager
def _repeatable(device: Device) -> Iterator[None]:
    """Kernels that give the same bits on equal machines: always on a CPU with equal threads, on a GPU in this block.

    What has no such kernel is an error of PyTorch's.
    """
    if device == "cpu":
        yield
        return
    for name, value in GPU_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    before, warns = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        # Fused kernels need not repeat in their backward pass; sequences are short.
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warns)


def pad_supervised(pairs: Sequence[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor]:
    """Right-padded tokens and labels `[pairs, width]`; a label is -100 off the answer."""
    width = max(len(prompt) + len(answer) for prompt, answer in pairs)
    tokens = torch.zeros(len(pairs), width, dtype=torch.int64)
    labels = torch.full((len(pairs), width), _IGNORED, dtype=torch.int64)
    for row, (prompt, answer) in enumerate(pairs):
        start, end = len(prompt), len(prompt) + len(answer)
        tokens[row, :end] = torch.tensor(prompt + answer)
        labels[row, start:end] = torch.tensor(answer)
    return tokens, labels


def _train(
    model: torch.nn.Module,
    pairs: Sequence[tuple[list[int], list[int]]],
    settings: WarmStart,
    progress: Callable[[int, float], None],
) -> None:
    """AdamW with a linear ramp, then linear decay to zero over the last third."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    generator, device = torch.Generator().manual_seed(settings.seed), next(model.parameters()).device
    model.train()
    for step in range(settings.steps):
        remaining = (settings.steps - step) / max(1.0, settings.steps / 3)
        factor = min(1.0, (step + 1) / _RAMP_STEPS, remaining)
        for group in optimizer.param_groups:
            group["lr"] = settings.learning_rate * factor
        chosen = torch.randint(len(pairs), (settings.batch_size,), generator=generator).tolist()
        tokens, labels = pad_supervised([pairs[i] for i in chosen])
        logits = model(input_ids=tokens.to(device), use_cache=False).logits
        targets = labels[:, 1:].flatten().to(device)
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), targets, ignore_index=_IGNORED)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, float(loss.detach()))
    model.eval()
