"""The two engines: the one that generates and the one that trains."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from conf.schema.base import Problem, Refusal, Section

_DISTRIBUTION = (
    "changes the sampling distribution: the recorded log-probabilities would no longer be those of the policy"
)


class Rollout(Section):
    """The engine that samples answers."""

    engine: Literal["torch"] = "torch"
    """Implementation: torch decodes token by token with a KV cache, on CPU too."""

    temperature: float = Field(default=1.0, gt=0.0)
    """Sampling temperature (> 0); evaluation is greedy whatever stands here."""

    top_p: float = 1.0
    """Nucleus sampling; only 1.0 (off)."""

    top_k: int | None = None
    """Top-k sampling; only null (off)."""

    max_new_tokens: int = Field(default=8, ge=1)
    """Longest answer, the end token included (tokens, >= 1)."""

    batch_size: int = Field(default=512, ge=1)
    """Sequences decoded together (sequences, >= 1)."""

    threads: int = Field(default=2, ge=1)
    """CPU threads of the engine (>= 1)."""

    @field_validator("top_p")
    @classmethod
    def _whole_nucleus(cls, value: float) -> float:
        if value != 1.0:
            raise Refusal(Problem("top_p", value, _DISTRIBUTION, "1.0"))
        return value

    @field_validator("top_k")
    @classmethod
    def _no_top_k(cls, value: int | None) -> int | None:
        if value is not None:
            raise Refusal(Problem("top_k", value, _DISTRIBUTION, "null"))
        return value


class Optimizer(Section):
    """AdamW, and the precision of the weights it updates and of its moments. Gradients accumulate in fp32 always."""

    learning_rate: float = Field(default=2e-4, gt=0.0)
    """Learning rate after warm-up (> 0)."""

    beta1: float = Field(default=0.9, ge=0.0, lt=1.0)
    """Decay of the first moment (0 <= x < 1)."""

    beta2: float = Field(default=0.95, ge=0.0, lt=1.0)
    """Decay of the second moment (0 <= x < 1)."""

    eps: float = Field(default=1e-8, gt=0.0)
    """Added to the root of the second moment (> 0)."""

    weight_decay: float = Field(default=0.0, ge=0.0)
    """Decoupled weight decay (>= 0)."""

    weights: Literal["fp32_master", "bf16_kahan", "bf16"] = "fp32_master"
    """What updates are added to: fp32 masters; the BF16 weights with Kahan compensation; or those alone."""

    state: Literal["fp32", "bf16", "fp8"] = "fp32"
    """Storage of the two moments; bf16 and fp8 (E4M3, one scale for 256 elements) are rounded stochastically."""

    max_grad_norm: float | None = Field(default=1.0, gt=0.0)
    """Global norm to which gradients are clipped, after max_grad_value (> 0); null: not clipped."""

    max_grad_value: float | None = Field(default=None, gt=0.0)
    """Magnitude to which every element of the gradient is clipped (> 0); null: not clipped."""

    max_weight: float | None = Field(default=None, gt=0.0)
    """Magnitude to which every weight is clipped after an update (> 0); null: not clipped."""

    warmup_steps: int = Field(default=5, ge=0)
    """Updates over which the learning rate rises linearly (>= 0)."""


class Trainer(Section):
    """The engine that scores and trains."""

    engine: Literal["torch"] = "torch"
    """Implementation: torch, on CPU too."""

    micro_batch_size: int = Field(default=256, ge=1)
    """Sequences per forward and backward pass (>= 1); a divisor of an update's samples, or no less."""

    threads: int = Field(default=2, ge=1)
    """CPU threads of the engine (>= 1)."""

    optimizer: Optimizer
    """Optimiser of the policy."""
