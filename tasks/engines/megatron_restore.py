"""A checkpoint back into the optimisers of a Megatron model's ranks, whatever layout or trainer wrote it.

Each rank checks the names and forms of the whole checkpoint, and reads of the tensors only its own parts.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from conf.schema import Optimizer
from tasks.engines.megatron_checkpoint import CODES, SCALES, STEP, StateHolder
from tasks.engines.megatron_names import Entry, ModelShape, entry_shape, fuse, hf_shapes, source_shape
from tasks.engines.megatron_shards import fuse_parts, part_bounds, separable, whole_model
from tasks.engines.megatron_world import World
from tasks.engines.protocols import EngineError
from tasks.engines.tensor_files import TensorFiles, rank_files
from tasks.engines.torch_optimizer import check_weights
from tasks.engines.trainer_state import OPTIMIZER, WEIGHTS
from tasks.numerics.moment_layout import block_of, narrow_scales, shared_in_blocks, spread_scales
from tasks.numerics.moments import FP8_BLOCK, FP8_SMALLEST, moment_slots, pack_moments, unpack_moments

if TYPE_CHECKING:
    from tasks.engines.megatron_model import MegatronModel

log = logging.getLogger(__name__)

_FP8 = tuple(f"exp_avg{moment}{part}" for moment in ("", "_sq_root") for part in (CODES, SCALES))
_PLAIN = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class Reader:
    """One rank's view of a checkpoint. `settings` of the optimiser that is to continue."""

    shape: ModelShape
    entries: Mapping[str, Entry]
    rank: int
    size: int
    settings: Optimizer
    weights: TensorFiles
    state: TensorFiles
    kinds: Mapping[str, frozenset[str]]

    def elements(self, entry: Entry, kind: str | None) -> Tensor:
        """This rank's shard of the weight (None) or of a kind of state that has an element for each of it."""
        files, dot = (self.weights, "") if kind is None else (self.state, f".{kind}")
        if not separable(self.shape, entry, self.size):
            whole = [_as_bytes(files.get(f"{name}{dot}")) for name in entry.sources]
            return _as_codes(fuse(self.shape, entry, whole, self.rank, self.size), kind)
        cut = entry.layout != "whole" and self.size > 1
        size = self.size if cut else 1
        parts = {}
        for name in entry.sources:
            bounds = part_bounds(self.shape, entry, name, self.rank if cut else 0, size)
            read = files.part(f"{name}{dot}", *bounds) if cut else files.get(f"{name}{dot}")
            parts[name] = _as_bytes(read)
        return _as_codes(fuse_parts(self.shape, entry, parts, size), kind)

    def spread(self, entry: Entry, kind: str) -> Tensor:
        """The scale of each element of this rank's shard, fp32."""
        whole = [
            spread_scales(self.state.get(f"{name}.{kind}"), source_shape(self.shape, name)) for name in entry.sources
        ]
        rank, size = (0, 1) if entry.layout == "whole" else (self.rank, self.size)
        found = fuse(self.shape, entry, whole, rank, size)
        if entry.layout == "vocabulary":
            dim, start, stop = part_bounds(self.shape, entry, entry.sources[0], rank, size)
            _scale_padding(found.view(-1), (stop - start) * found.shape[1 - dim])
        return found

    def parameter_state(self, name: str, number: int) -> tuple[dict[str, Tensor], bool]:
        """State of one of this rank's parameters, and whether it is exactly what was saved; `number` of updates."""
        entry = self.entries[name]
        held = [self.kinds.get(source, frozenset()) for source in entry.sources]
        if self.settings.state == "fp8" and any(kinds & {*_FP8, *_PLAIN} for kinds in held):
            return self._fp8_state(entry, held, number)
        return {kind: self._kind(entry, kind) for kind in sorted(held[0])}, True

    def _kind(self, entry: Entry, kind: str) -> Tensor:
        if kind == STEP:
            return self.state.get(f"{entry.sources[0]}.{kind}")
        if kind.endswith(SCALES):
            return narrow_scales(self.spread(entry, kind), FP8_BLOCK)
        return self.elements(entry, kind)

    def _fp8_state(self, entry: Entry, held: Sequence[frozenset[str]], number: int) -> tuple[dict[str, Tensor], bool]:
        shape = entry_shape(self.shape, entry, 1 if entry.layout == "whole" else self.size)
        wanted, others = moment_slots(shape, "fp8"), sorted(held[0] - {*_FP8, *_PLAIN})
        found = {kind: self._kind(entry, kind) for kind in others}
        if all({*_FP8} <= kinds for kinds in held):
            scales = {kind: self.spread(entry, kind) for kind in _FP8 if kind.endswith(SCALES)}
            codes = {kind: self.elements(entry, kind) for kind in _FP8 if kind.endswith(CODES)}
            if _FP8[0] in wanted and all(map(shared_in_blocks, scales.values())):
                return found | codes | {kind: narrow_scales(s, FP8_BLOCK) for kind, s in scales.items()}, True
            first, second = _decoded(codes, scales)
        elif all({*_PLAIN} <= kinds for kinds in held):
            first, second = (self.elements(entry, kind) for kind in _PLAIN)
            if _PLAIN[0] in wanted:
                return found | {"exp_avg": first, "exp_avg_sq": second}, True
        else:
            first, second = self._mixed(entry, held)
        generator = torch.Generator().manual_seed(number)
        packed = pack_moments(first.to(torch.float32), second.to(torch.float32), "fp8", generator)
        # Too small for FP8 here: decoded, the moments are what they were.
        return found | packed, _PLAIN[0] in wanted

    def _mixed(self, entry: Entry, held: Sequence[frozenset[str]]) -> tuple[Tensor, Tensor]:
        """fp32 moments of a parameter whose Hugging Face tensors are not all large enough for FP8."""
        parts: tuple[list[Tensor], list[Tensor]] = [], []
        for name, kinds in zip(entry.sources, held, strict=True):
            chosen = _FP8 if {*_FP8} <= kinds else _PLAIN
            found = unpack_or_spread({kind: self.state.get(f"{name}.{kind}") for kind in chosen})
            for part, tensor in zip(parts, found, strict=True):
                part.append(tensor)
        rank, size = (0, 1) if entry.layout == "whole" else (self.rank, self.size)
        first, second = (fuse(self.shape, entry, part, rank, size) for part in parts)
        return first, second


def _scale_padding(scales: Tensor, real: int) -> None:
    """Scales of the zeros behind `real` elements as quantising gives them: that of the block they are in, else 1."""
    ends = -(-real // FP8_BLOCK) * FP8_BLOCK
    if real:
        scales[real:ends] = scales[real - 1].clone()
    scales[ends:] = 1.0


def unpack_or_spread(stored: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """fp32 moments of a whole tensor's stored ones, whose FP8 scales may be finer than one for 256 elements."""
    if "exp_avg" in stored:
        return unpack_moments(dict(stored))
    codes = {kind: tensor for kind, tensor in stored.items() if kind.endswith(CODES)}
    shape = next(iter(codes.values())).shape
    return _decoded(codes, {k: spread_scales(t, shape) for k, t in stored.items() if k.endswith(SCALES)})


def _decoded(codes: Mapping[str, Tensor], scales: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """fp32 moments of FP8 codes and the scale of each element."""
    first = codes["exp_avg_codes"].to(torch.float32) * scales["exp_avg_scales"]
    return first, (codes["exp_avg_sq_root_codes"].to(torch.float32) * scales["exp_avg_sq_root_scales"]).square()


def _as_bytes(tensor: Tensor) -> Tensor:
    """FP8 as bytes: not every device joins and cuts FP8."""
    return tensor.view(torch.uint8) if tensor.dtype == torch.float8_e4m3fn else tensor


def _as_codes(tensor: Tensor, kind: str | None) -> Tensor:
    return tensor.view(torch.float8_e4m3fn) if kind is not None and kind.endswith(CODES) else tensor


def read_owned(reader: Reader, names: Iterable[str], updates: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights and state of this rank's parameters `names`, as `StateHolder.load` takes them; see `check_forms`."""
    check_forms(reader)
    weights: dict[str, Tensor] = {}
    state: dict[str, Tensor] = {}
    changed: list[str] = []
    for name in names:
        weights[name] = reader.elements(reader.entries[name], None)
        found, exact = reader.parameter_state(name, updates)
        state |= {f"{name}.{kind}": tensor for kind, tensor in found.items()}
        if not exact:
            changed.append(name)
    if changed:
        log.warning(
            "FP8 moments of %d parameters (%s first) are quantised anew: their blocks of %d elements are others in the "
            "layout that was saved",
            len(changed),
            changed[0],
            FP8_BLOCK,
        )
    return weights, state


def check_forms(reader: Reader) -> None:
    """`EngineError` unless the checkpoint is one of this model and of this optimiser's kind, whoever owns what."""
    dtype = torch.float32 if reader.settings.weights == "fp32_master" else torch.bfloat16
    wanted = {name: torch.empty(form, dtype=dtype, device="meta") for name, form in hf_shapes(reader.shape).items()}
    forms = reader.weights.forms.items()
    check_weights({name: torch.empty(f.shape, dtype=f.dtype, device="meta") for name, f in forms}, wanted)
    unknown = sorted(reader.kinds.keys() - wanted.keys())
    if unknown:
        raise EngineError(f"{unknown[0]}: optimiser state of a weight that the model lacks")
    for entry in whole_model(reader.shape):
        _check_state(reader, entry)
    if reader.settings.state == "fp8" and reader.kinds and not any({*_FP8} <= k for k in reader.kinds.values()):
        raise EngineError("no weight of the checkpoint has FP8 moments: trainer.optimizer.state differs")


def _wanted(settings: Optimizer, kinds: frozenset[str]) -> dict[str, torch.dtype]:
    """Kinds and types of a weight's state as the optimiser keeps them; with FP8 moments a small one's are fp32."""
    storage = settings.state
    if storage == "fp8" and not {*_FP8} & kinds:
        storage = "fp32"
    size = FP8_SMALLEST if storage == "fp8" else 1
    found = {kind: slot.dtype for kind, slot in moment_slots((size,), storage).items()} | {STEP: torch.float32}
    return found | {"compensation": torch.bfloat16} if settings.weights == "bf16_kahan" else found


def _check_state(reader: Reader, entry: Entry) -> None:
    held = [reader.kinds.get(name, frozenset()) for name in entry.sources]
    # Which tensors are large enough for FP8 moments depends on how they are cut.
    forms = [kinds - {*_FP8, *_PLAIN} if reader.settings.state == "fp8" else kinds for kinds in held]
    if any(other != forms[0] for other in forms[1:]):
        raise EngineError(f"{', '.join(entry.sources)}: optimiser state differs in kind: {[sorted(k) for k in held]}")
    for name, kinds in zip(entry.sources, held, strict=True):
        if kinds:
            _check_kinds(reader, name, kinds)
    if STEP in held[0]:
        steps = [float(reader.state.get(f"{name}.{STEP}")) for name in entry.sources]
        if len(set(steps)) > 1:
            raise EngineError(f"{', '.join(entry.sources)}: updated {steps} times")


def _check_kinds(reader: Reader, name: str, kinds: frozenset[str]) -> None:
    wanted, shape = _wanted(reader.settings, kinds), source_shape(reader.shape, name)
    if kinds != wanted.keys():
        raise EngineError(
            f"{name}: the checkpoint's optimiser state is {sorted(kinds)}, this optimiser's {sorted(wanted)}: "
            "trainer.optimizer.weights or .state differ"
        )
    for kind, dtype in wanted.items():
        form = reader.state.forms[f"{name}.{kind}"]
        if kind.endswith(SCALES):
            try:
                block_of(form.shape[0] if len(form.shape) == 1 else 0, torch.Size(shape).numel())
            except ValueError as error:
                raise EngineError(f"{name}.{kind}: {error}") from error
        elif form.shape != (() if kind == STEP else shape):
            raise EngineError(f"{name}.{kind}: checkpoint {form.shape}, this optimiser {shape}")
        if form.dtype != dtype:
            raise EngineError(f"{name}.{kind}: checkpoint {form.dtype}, this optimiser {dtype}")


def kinds_of(names: Sequence[str]) -> dict[str, frozenset[str]]:
    """Kinds of state that each weight has, from `<weight>.<kind>`."""
    found: dict[str, set[str]] = {}
    for full in names:
        name, _, kind = full.rpartition(".")
        found.setdefault(name, set()).add(kind)
    return {name: frozenset(kinds) for name, kinds in found.items()}


def load_checkpoint(
    model: MegatronModel, world: World, directory: Path, settings: Optimizer, holder: StateHolder, updates: int
) -> None:
    """Restore what this rank owns. `EngineError`, and nothing is changed on any rank, unless everything fits."""
    part, entries = model.part, {entry.name: entry for entry in model.entries}

    def read() -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        files = [rank_files(directory, stem) for stem in (WEIGHTS, OPTIMIZER)]
        with TensorFiles(files[0]) as weights, TensorFiles(files[1]) as state:
            kinds = kinds_of(tuple(state.forms))
            place = part.tensor_rank, part.tensor_size
            reader = Reader(model.plan.shape, entries, *place, settings, weights, state, kinds)
            return read_owned(reader, holder.weights(), updates)

    holder.load(*world.together(f"loading {directory}", read), updates)
