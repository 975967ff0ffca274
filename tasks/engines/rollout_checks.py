"""What every rollout engine checks before it touches its state: requests and sync payloads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tasks.engines.protocols import (
    EngineError,
    GenerateRequest,
    SyncError,
    SyncHeader,
    TensorForm,
    TokenRows,
    WeightVersionError,
)
from tasks.numerics.kv_scales import scale_faults


def forms_of(tensors: Mapping[str, Tensor]) -> dict[str, TensorForm]:
    """The form of live tensors, by the same names."""
    return {name: TensorForm(tuple(t.shape), t.dtype) for name, t in tensors.items()}


def check_header(header: SyncHeader, held: Mapping[str, TensorForm], layers: int, heads: int | None) -> None:
    """`SyncError` unless the sync brings every held tensor in its form, no other, and usable scales.

    `layers` with Q/K/V scales (0 without an FP8 cache); `heads` as in `scale_faults`.
    """
    missing, extra = sorted(held.keys() - header.forms.keys()), sorted(header.forms.keys() - held.keys())
    if missing or extra:
        raise SyncError(f"a sync brings every tensor and no other: missing {missing[:3]}, extra {extra[:3]}")
    faults = scale_faults(header.kv_scales, layers, heads)
    if faults:
        raise SyncError(f"Q/K/V scales do not fit the recipe: {'; '.join(faults[:3])}")
    for name, form in held.items():
        check_form(name, header.forms[name], form)


def check_form(name: str, sent: TensorForm, held: TensorForm) -> None:
    """`SyncError` where a tensor does not come as it is held."""
    if sent != held:
        raise SyncError(f"{name}: sent {sent.shape} {sent.dtype}, the engine holds {held.shape} {held.dtype}")


def check_version(held: int | None, asked: int) -> None:
    """`WeightVersionError` unless the engine holds the version that a request expects; `held` None while dirty."""
    if held != asked:
        raise WeightVersionError(f"the request expects version {asked}, the engine holds {held}")


def check_request(request: GenerateRequest, positions: int, vocabulary: int) -> None:
    """`EngineError` for a request that means nothing, or whose samples may outgrow `positions`."""
    if not request.prompts:
        raise EngineError("the request has no prompts")
    if request.max_new_tokens < 1:
        raise EngineError(f"max_new_tokens {request.max_new_tokens}: at least 1 token can be asked for")
    if not request.greedy and not request.temperature > 0:
        raise EngineError(f"temperature {request.temperature}: sampling needs one above 0")
    for prompt in request.prompts:
        if not prompt.token_ids or not prompt.seeds:
            raise EngineError(f"prompt {prompt.id}: no tokens or no seeds")
        unknown = [token for token in prompt.token_ids if not 0 <= token < vocabulary]
        if unknown:
            raise EngineError(f"prompt {prompt.id}: token {unknown[0]} is not one of the model's {vocabulary} tokens")
        if len(prompt.token_ids) + request.max_new_tokens > positions:
            raise EngineError(
                f"prompt {prompt.id}: {len(prompt.token_ids)} tokens + rollout.max_new_tokens "
                f"{request.max_new_tokens} exceed the model's {positions} positions"
            )


def check_rows(rows: TokenRows, prompt_lengths: Tensor, positions: int, vocabulary: int, spare: int = 0) -> None:
    """`EngineError` for sequences whose responses have no log-probabilities in a model of `positions` positions.

    `spare`: positions that the engine needs behind the last token.
    """
    count, width = rows.tokens.shape
    if not count:
        raise EngineError("there are no sequences to score")
    if rows.lengths.shape != (count,) or prompt_lengths.shape != (count,):
        given = f"{tuple(rows.lengths.shape)} lengths, {tuple(prompt_lengths.shape)} prompt lengths"
        raise EngineError(f"{count} sequences need as many lengths and prompt lengths; given: {given}")
    real = torch.arange(width) < rows.lengths.unsqueeze(1)
    unknown = real & ((rows.tokens < 0) | (rows.tokens >= vocabulary))
    for row, (prompt, length) in enumerate(zip(prompt_lengths.tolist(), rows.lengths.tolist(), strict=True)):
        if not 1 <= prompt <= length <= width:
            wrong = f"a prompt of {prompt} tokens in a sequence of {length}, {width} columns wide"
            raise EngineError(f"sequence {row}: {wrong}; allowed: 1 <= prompt <= sequence <= columns")
        if unknown[row].any():
            token = int(rows.tokens[row][unknown[row]][0])
            raise EngineError(f"sequence {row}: token {token} is not one of the model's {vocabulary} tokens")
        if length + spare > positions:
            more = f", of which the engine needs {spare} behind the last token" if spare else ""
            raise EngineError(f"sequence {row}: {length} tokens exceed the model's {positions} positions{more}")
