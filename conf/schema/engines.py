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
    """AdamW on fp32 master weights."""

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

    max_grad_norm: float = Field(default=1.0, gt=0.0)
    """Global norm to which gradients are clipped (> 0)."""

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
