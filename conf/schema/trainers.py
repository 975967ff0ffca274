"""The engine that scores and trains."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, ValidationInfo, field_validator

from conf.schema.base import Problem, Refusal, Section


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


class TorchTrainer(Section):
    """The PyTorch engine: one process."""

    engine: Literal["torch"] = "torch"
    """Implementation: torch, on CPU too."""

    micro_batch_size: int = Field(default=256, ge=1)
    """Sequences per forward and backward pass (>= 1); a divisor of an update's samples, or no less."""

    threads: int = Field(default=2, ge=1)
    """CPU threads of the engine (>= 1)."""

    optimizer: Optimizer
    """Optimiser of the policy."""

    @property
    def ranks(self) -> int:
        """Processes of the trainer."""
        return 1


class LrSchedule(Section):
    """What the learning rate does after the optimiser's warm-up."""

    shape: Literal["constant", "linear", "cosine"] = "constant"
    """constant; or a fall from the optimiser's learning_rate to min_lr, in a straight line or half a cosine."""

    min_lr: float = Field(default=0.0, ge=0.0)
    """Learning rate at the end of the fall and from there on (>= 0, at most learning_rate); constant ignores it."""

    decay_updates: int | None = Field(default=None, ge=1)
    """Update at which the fall ends, warm-up included (>= 1, above warmup_steps); null with constant only."""

    @field_validator("decay_updates")
    @classmethod
    def _a_fall_has_an_end(cls, value: int | None, info: ValidationInfo) -> int | None:
        shape = info.data.get("shape")
        if shape in ("linear", "cosine") and value is None:
            # Not the run's own length: steps may be raised when a run goes on, and its past must stay what it was.
            wrong = f"a {shape} schedule needs an end"
            raise Refusal(Problem("decay_updates", value, wrong, "an integer >= 1, or shape=constant"))
        return value


class MegatronTrainer(Section):
    """Megatron Core, with Transformer Engine on a GPU; one process for each rank.

    Data-parallel ranks are what the others leave: ranks / (tensor * pipeline * context). On a GPU, tensor parallelism
    brings sequence parallelism along. Experts are split by expert_parallel_size alone, never within a matrix.
    """

    engine: Literal["megatron"] = "megatron"
    """Implementation: Megatron Core."""

    device: Literal["gpu", "cpu"] = "gpu"
    """Where the ranks compute: a GPU each; or the CPU, for tests, in BF16 without context or sequence parallelism."""

    ranks: int = Field(default=1, ge=1)
    """Processes of the trainer (>= 1)."""

    threads: int = Field(default=2, ge=1)
    """CPU threads of each rank (>= 1)."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each matrix (>= 1)."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share the layers (>= 1)."""

    context_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share each sequence (>= 1)."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share a layer's experts (>= 1), out of the tensor, context and data ranks."""

    tokens_per_micro_batch: int = Field(default=16384, ge=1)
    """Packed tokens of a forward and backward pass on a data-parallel rank, padding included (>= 1); a longer row
    goes alone."""

    logprob_chunk: int = Field(default=1024, ge=1)
    """Tokens that have logits over the vocabulary at a time (>= 1)."""

    recompute: Literal["selective", "full"] = "selective"
    """What the backward pass computes again: the attention's inside only; or whole layers, from their inputs."""

    optimizer: Optimizer
    """Optimiser of the policy, the same as trainer=torch has, on CPU and GPU."""

    lr_schedule: LrSchedule = Field(default_factory=LrSchedule)
    """Learning rate after the warm-up."""

    distributed_optimizer: bool = True
    """Whether masters and moments are split, by whole parameters, over the ranks that hold copies of them (ZeRO-1)."""

    deterministic: bool = False
    """Whether only kernels are used that repeat their results bit for bit."""

    offload: bool = False
    """Whether masters, moments and parameters move to host memory while the rollout engine samples. GPU only. null in a
    run's configuration: where cluster.share_gpus puts both engines on one GPU."""

    @field_validator("offload", mode="before")
    @classmethod
    def _null_is_no_offload(cls, value: Any) -> Any:
        """Outside a run's configuration, which has filled it in."""
        return False if value is None else value

    @property
    def model_parallel_size(self) -> int:
        """Ranks that hold one copy of the model."""
        return self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size

    @property
    def data_parallel_size(self) -> int:
        """Copies of the model that see different rows."""
        return self.ranks // self.model_parallel_size

    @property
    def sequence_parallel(self) -> bool:
        """Whether norms and residuals are split over the tensor ranks, too."""
        return self.device == "gpu" and self.tensor_parallel_size > 1


def trains_on_gpus(trainer: TorchTrainer | MegatronTrainer) -> bool:
    """Whether the trainer's engine computes on GPUs; the PyTorch one never does."""
    return isinstance(trainer, MegatronTrainer) and trainer.device == "gpu"


Trainer = Annotated[TorchTrainer | MegatronTrainer, Field(discriminator="engine")]
"""The engine that scores and trains."""
