"""Before step 1: does this model bear an FP8 KV cache? The same tokens are scored with a BF16 cache and an FP8 one.

Without Q/K-norm a few channels of K can be so large that the one scale of a layer leaves nothing of the others.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from conf.schema import KvPrecision, KvPreflight, Problem, Recipe, RunConfig
from tasks.calls import Engines, stopwatch
from tasks.data.examples import Dataset
from tasks.data.tokens import TextCodec
from tasks.engines.protocols import GenerateRequest, RolloutBatch, TokenRows
from tasks.numerics.mismatch_detail import abs_diff_by_position
from tasks.phase_task import phase_task
from tasks.rollout import generate, sampling_prompts
from tasks.sync import sync

_PREFLIGHT_STEP = -1
"""Step number in the seeds of the samples; the bootstrap has 0, training steps count from 1."""

MEAN = "preflight/mean_abs_logprob_diff"
LARGEST = "preflight/max_abs_logprob_diff"
ERROR = "preflight/token_mult_prob_error"
TOKENS = "preflight/tokens"

_REMEDY = "a recipe whose KV cache is BF16 (recipe=fp8_e2e, fp8_rollout or bf16), or a model with Q/K-norm"


def wanted(config: RunConfig) -> bool:
    """Whether a new run of this configuration begins with the measurement."""
    return config.recipe.kv.quantized and config.rollout.kv_preflight.enabled


def bf16_cache(recipe: Recipe) -> Recipe:
    """The recipe with a BF16 KV cache and attention; linear layers as they are."""
    return recipe.model_copy(update={"kv": KvPrecision()})


@dataclass
class Reference:
    """Sequences and their log-probabilities under a BF16 cache.

    `mask` (bool) and `logprobs` `[rows, width]`: the response tokens that are compared. `seconds` it took.
    """

    rows: TokenRows
    prompt_lengths: Tensor
    logprobs: Tensor
    seconds: float

    @property
    def mask(self) -> Tensor:
        column = torch.arange(self.rows.tokens.shape[1])
        return (column >= self.prompt_lengths.unsqueeze(1)) & (column < self.rows.lengths.unsqueeze(1))


@phase_task("preflight-reference")
def preflight_reference(
    engines: Engines, config: RunConfig, dataset: Dataset, codec: TextCodec, expected_linears: tuple[str, ...]
) -> Reference:
    """Sample and score with an engine of `bf16_cache`, which the rollout actor must hold. Draws no data."""
    settings = config.rollout.kv_preflight
    with stopwatch() as watch:
        version = int(sync.fn(engines, bf16_cache(config.recipe), expected_linears, config.cluster)["version"])
        examples = dataset.batch(config.seed, 0, min(settings.prompts, len(dataset.train)))
        prompts = sampling_prompts(examples, codec, config.seed, _PREFLIGHT_STEP, 1)
        limit = min(settings.max_new_tokens or config.rollout.max_new_tokens, config.rollout.max_new_tokens)
        request = GenerateRequest(version, prompts, limit, config.rollout.temperature, codec.eos_token_ids)
        clock = engines.clock("preflight_s")
        _, batch_ref = generate("pre-flight (generate)", engines, request, clock)
        batch: RolloutBatch = engines.answer("pre-flight (generate)", "rollout", batch_ref, clock)
        # A sequence that fills the model's positions is scored without its last token: see `logprobs` of vLLM.
        rows = TokenRows(batch.tokens, batch.lengths.clamp(max=config.rollout.positions(codec.max_positions) - 1))
        # Not the log-probabilities of sampling, which are of another temperature and, on a GPU, of another kernel.
        ref = engines.rollout.logprobs.remote(version, rows, batch.prompt_lengths)
        logprobs = engines.answer("pre-flight (score, BF16 cache)", "rollout", ref, clock)
    return Reference(rows, batch.prompt_lengths, logprobs, watch.seconds)


@phase_task("preflight-compare")
def preflight_compare(engines: Engines, reference: Reference, version: int) -> dict[str, float]:
    """Score the reference's tokens with the run's own engine, which holds `version`.

    Returns what `cache_mismatch` does, and `time/preflight_s`, with the reference's.
    """
    with stopwatch() as watch:
        ref = engines.rollout.logprobs.remote(version, reference.rows, reference.prompt_lengths)
        clock = engines.clock("preflight_s")
        logprobs = engines.answer("pre-flight (score, FP8 cache)", "rollout", ref, clock)
    measured = cache_mismatch(logprobs, reference.logprobs, reference.mask)
    return measured | {"time/preflight_s": reference.seconds + watch.seconds}


def cache_mismatch(p: Tensor, q: Tensor, mask: Tensor) -> dict[str, float]:
    """The `preflight/*` metrics: p under the FP8 cache, q under the BF16 one, at the tokens of `mask` (bool).

    All `[sequences, tokens]`, nats. NaN if any of them is not finite, or if there is none.
    """
    tokens = {TOKENS: float(mask.sum())}
    if not bool(mask.any()) or not bool((torch.isfinite(p) & torch.isfinite(q))[mask].all()):
        return dict.fromkeys((MEAN, LARGEST, ERROR), math.nan) | tokens
    (whole,) = abs_diff_by_position(p, q, mask, edges=(0,))
    return {MEAN: whole.mean_abs, LARGEST: whole.max_abs, ERROR: whole.token_mult_prob_error} | tokens


def verdict(mean_abs: float, limits: KvPreflight) -> Literal["fine", "warn", "refuse"]:
    """What a mean |d| means for the run. Equal to a limit is within it; NaN is refused."""
    if not mean_abs <= limits.refuse:
        return "refuse"
    return "warn" if mean_abs > limits.warn else "fine"


def described(measured: dict[str, float]) -> str:
    """The measurement in a line."""
    return (
        f"mean |d| {measured[MEAN]:.4g} of log-probabilities between an FP8 and a BF16 KV cache "
        f"({measured[TOKENS]:.0f} tokens, largest {measured[LARGEST]:.4g})"
    )


def warning(measured: dict[str, float], limits: KvPreflight) -> str:
    """What to say above `warn`."""
    return f"{described(measured)} is above rollout.kv_preflight.warn {limits.warn:g}; safer: {_REMEDY}"


def refusal(measured: dict[str, float], limits: KvPreflight) -> Problem:
    """What to say above `refuse`."""
    allowed = f"up to {limits.refuse:g}; {_REMEDY}; or a larger bound"
    return Problem("rollout.kv_preflight.refuse", limits.refuse, f"this model has {described(measured)}", allowed)
