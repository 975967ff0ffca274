"""The memory plan of a rank and of the KV pool, worked out by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from conf.compose import compose
from conf.schema import VllmRollout
from tasks.engines.memory_plan import LayerShape, RankMemory, activation_bytes, kv_capacity_tokens, layer_shape
from tasks.engines.plan import plan_run, shape_model

PARAMETERS = 8_190_735_360
LINEARS = 36 * (4096 * (4096 + 1024 + 1024 + 4096) + 3 * 4096 * 12288)
EMBEDDING = 151936 * 4096
NORMS = 36 * (2 * 4096 + 2 * 128) + 4096
EIGHT = LayerShape(hidden=4096, heads=32, kv_heads=8, head_dim=128, width=12288, qk_norm=True)


def _rank(*overrides: str, model: str = "qwen3_8b_base", recipe: str = "bf16") -> RankMemory:
    config = compose([f"model={model}", "trainer=megatron", "rollout=vllm", f"recipe={recipe}", *overrides])
    memory = plan_run(config).rank_memory
    assert memory is not None
    return memory


def test_the_numbers_of_qwen3_8b() -> None:
    assert LINEARS + 2 * EMBEDDING + NORMS == PARAMETERS
    memory = _rank()
    assert memory.weights == 2 * PARAMETERS == 16_381_470_720
    assert memory.gradients == 4 * PARAMETERS
    assert memory.optimizer == 12 * PARAMETERS
    assert memory.fp8_copies == 0
    assert memory.total == sum((memory.weights, memory.gradients, memory.optimizer, memory.activations, memory.output))


def test_the_torch_trainer_has_no_ranks() -> None:
    assert plan_run(compose()).rank_memory is None


@pytest.mark.parametrize(
    ("weights", "state", "element"),
    [
        ("fp32_master", "fp32", 12),
        ("fp32_master", "bf16", 8),
        ("fp32_master", "fp8", 6),
        ("bf16_kahan", "bf16", 6),
        ("bf16", "bf16", 4),
    ],
)
def test_the_optimizer_by_its_precision(weights: str, state: str, element: int) -> None:
    memory = _rank(f"trainer.optimizer.weights={weights}", f"trainer.optimizer.state={state}")
    assert memory.optimizer == element * PARAMETERS


def _trainer_bytes(*overrides: str) -> int:
    return plan_run(compose(["model=qwen3_8b_base", "recipe=bf16", *overrides])).trainer_bytes


def test_what_all_ranks_hold_together() -> None:
    """BF16 weights and fp32 gradients on each of them; masters and moments once where they are distributed."""
    assert _trainer_bytes() == 18 * PARAMETERS
    assert _trainer_bytes("algorithm.kl_coef=0.01") == 20 * PARAMETERS
    assert _trainer_bytes("trainer=megatron") == 18 * PARAMETERS
    assert _trainer_bytes("trainer=megatron", "trainer.ranks=4") == (4 * 6 + 12) * PARAMETERS
    whole = ("trainer=megatron", "trainer.ranks=4", "trainer.distributed_optimizer=false")
    assert _trainer_bytes(*whole) == 4 * 18 * PARAMETERS
    # Stages have parts of their own: each weight is on two of four ranks.
    assert _trainer_bytes("trainer=megatron", "trainer.ranks=4", "trainer.pipeline_parallel_size=2") == (
        (2 * 6 + 12) * PARAMETERS
    )


def test_quantised_weights_stand_beside_the_bf16_ones() -> None:
    assert _rank(recipe="fp8_rollout").fp8_copies == 0
    memory = _rank(recipe="fp8_e2e")
    assert memory.weights == 2 * PARAMETERS
    assert memory.fp8_copies == 2 * LINEARS
    kept = _rank("recipe.training_linears.keep_first_layers=9", recipe="fp8_e2e")
    assert kept.fp8_copies == 2 * LINEARS * 27 // 36


def test_tensor_ranks_split_all_but_norms() -> None:
    memory = _rank("trainer.ranks=8", "trainer.tensor_parallel_size=2")
    # 151936 = 593.5 * 256: the vocabulary is padded to a multiple of 128 on each of two ranks.
    rows = 152064 // 2
    elements = LINEARS // 2 + 2 * rows * 4096 + NORMS
    assert memory.weights == 2 * elements
    assert memory.optimizer == 12 * -(-elements // 4), "split over the four data-parallel ranks"
    whole = _rank("trainer.ranks=8", "trainer.tensor_parallel_size=2", "trainer.distributed_optimizer=false")
    assert whole.optimizer == 12 * elements


def test_key_value_heads_are_not_split_below_one() -> None:
    """Two heads over four ranks: each rank has one."""
    shape = ["model.architecture.num_key_value_heads=2", "trainer.ranks=4", "trainer.tensor_parallel_size=4"]
    memory = _rank(*shape, model="tiny_qwen3")
    queries, keys, mlp = 2 * 256 * 512 // 4, 2 * 256 * 256 // 2, 3 * 256 * 512 // 4
    # 256 tokens are padded to 512, 128 for each rank.
    elements = 2 * (queries + keys + mlp + 2 * 256 + 2 * 128) + 128 * 256 + 256
    assert memory.weights == 2 * elements


def test_context_ranks_share_the_optimizer_and_the_tokens() -> None:
    memory, alone = _rank("trainer.ranks=2", "trainer.context_parallel_size=2"), _rank()
    assert memory.weights == alone.weights
    assert memory.optimizer == 6 * PARAMETERS
    assert memory.activations == alone.activations // 2


def test_the_fullest_pipeline_stage_counts() -> None:
    memory = _rank("trainer.ranks=4", "trainer.pipeline_parallel_size=4", "trainer.recompute=full")
    # The last stage has the output layer, final norm and what log-probabilities hold.
    assert memory.weights == 2 * (LINEARS // 4 + EMBEDDING + 9 * (2 * 4096 + 2 * 128) + 4096)
    assert memory.output > 0
    first = _rank("trainer.ranks=4", "trainer.pipeline_parallel_size=4")
    # Without recomputation the first stage's four micro-batches under way weigh more than that.
    assert first.output == 0
    assert first.activations == _rank().activations


def test_a_tied_output_layer_is_held_at_both_ends() -> None:
    memory = _rank("trainer.ranks=2", "trainer.pipeline_parallel_size=2", "trainer.recompute=full", model="tiny_qwen3")
    layer = 2 * 256 * 512 + 2 * 256 * 128 + 3 * 256 * 512 + 2 * 256 + 2 * 128
    assert memory.weights == 2 * (layer + 256 * 256 + 256)


def test_activations_of_a_gpt_layer_are_the_published_34_bytes_a_channel() -> None:
    """Korthikanti et al. 2022, eq. 2 without the attention's inside: 34 s b h.

    A GPT layer differs from ours by two dropout masks of a byte (2 h), and a GELU MLP that keeps 4 h before and 4 h
    after, where a gated one keeps three times its width. 4 bytes a head are FlashAttention's sums.
    """
    h = 1024
    gpt = LayerShape(hidden=h, heads=8, kv_heads=8, head_dim=128, width=4 * h, qk_norm=False)
    ours = activation_bytes(gpt) - 4 * gpt.heads
    assert ours - 2 * 3 * 4 * h + 2 * 2 * 4 * h + 2 * h == 34 * h


def test_activations_of_a_token_by_hand() -> None:
    split = 2 * (4096 + 2 * 1024) + 2 * 4096 + 4 * 32 + 2 * (4096 + 1024) + 2 * 3 * 12288
    assert activation_bytes(EIGHT) == 8 * 4096 + split == 137_344
    assert activation_bytes(EIGHT, tensor=2) == 8 * 4096 + split / 2
    assert activation_bytes(EIGHT, tensor=2, sequence_parallel=True) == 137_344 / 2
    no_norm = replace(EIGHT, qk_norm=False)
    assert activation_bytes(EIGHT) - activation_bytes(no_norm) == 2 * (4096 + 1024)
    routed = replace(EIGHT, routed=8, experts=128)
    assert activation_bytes(routed) - activation_bytes(EIGHT) == 2 * 8 * 4096 + 8 * 128


def test_the_shape_of_a_layer_is_the_models() -> None:
    assert layer_shape(shape_model(compose(["model=qwen3_8b_base"]))) == EIGHT
    assert layer_shape(shape_model(compose(["model=llama3_1_8b_instruct"]))) == replace(
        EIGHT, width=14336, qk_norm=False
    )
    assert layer_shape(shape_model(compose(["model=qwen3_30b_a3b"]))) == LayerShape(
        hidden=2048, heads=32, kv_heads=4, head_dim=128, width=8 * 768, qk_norm=True, routed=8, experts=128
    )


def test_activations_and_recomputation() -> None:
    tokens, layer = 16384, 137_344
    assert _rank().activations == 36 * tokens * layer
    assert _rank("trainer.recompute=full").activations == tokens * (36 * 2 * 4096 + layer)
    assert _rank("trainer.tokens_per_micro_batch=4096").activations == 36 * 4096 * layer


def test_the_output_layer_by_hand() -> None:
    memory = _rank("trainer.tokens_per_micro_batch=2048", "trainer.logprob_chunk=512")
    assert memory.output == 4 * 2048 * 4096 + 12 * 512 * 151936 + 4 * 151936 * 4096


def _experts(overrides: Sequence[str]) -> tuple[RankMemory, int, int]:
    """Memory, elements of all experts and of everything else in Qwen3-30B-A3B."""
    experts = 48 * 128 * 3 * 2048 * 768
    return _rank(*overrides, model="qwen3_30b_a3b"), experts, 30_532_122_624 - experts


def test_experts_are_split_by_expert_ranks_alone() -> None:
    memory, experts, rest = _experts(["trainer.ranks=8", "trainer.expert_parallel_size=8"])
    assert memory.weights == 2 * (experts // 8 + rest)
    # All eight ranks hold the rest; no two hold the same experts.
    assert memory.optimizer == 12 * (experts // 8 + -(-rest // 8))
    memory, experts, rest = _experts(["trainer.ranks=16", "trainer.expert_parallel_size=8"])
    assert memory.optimizer == 12 * (experts // 16 + -(-rest // 16))


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [
        ({"kv_cache_memory_bytes": 10_000}, 100),
        ({"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.5}, 450),
        ({"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.05}, 0),
    ],
)
def test_tokens_in_the_pool(settings: dict[str, object], tokens: int) -> None:
    rollout = VllmRollout.model_validate(settings)
    assert kv_capacity_tokens(rollout, weight_bytes=5_000, bytes_per_token=100, device_bytes=100_000) == tokens


def test_the_pool_of_qwen3_8b_on_an_h200() -> None:
    """A quarter of 141 GB: in BF16 weights of 16.38 GB and 147,456 bytes a token; FP8 has 9.44 GB and half of it."""
    found = []
    for recipe in ("bf16", "fp8_rollout_kv"):
        share = ["rollout.kv_cache_memory_bytes=null", "rollout.gpu_memory_utilization=0.25"]
        config = compose(["model=qwen3_8b_base", "rollout=vllm", f"recipe={recipe}", *share])
        plan = plan_run(config)
        assert isinstance(config.rollout, VllmRollout)
        found.append(kv_capacity_tokens(config.rollout, plan.rollout.weight_bytes, plan.kv_bytes_per_token, 141e9))
    bf16 = (35_250_000_000 - 16_381_470_720) // (2 * 36 * 8 * 128 * 2)
    scales = 4 * 36 * (32 * (32 + 8 + 8 + 32) + 3 * 32 * 96)
    fp8 = (35_250_000_000 - (LINEARS + scales + 2 * (2 * EMBEDDING + NORMS))) // (2 * 36 * 8 * 128)
    assert found == [bf16, fp8]
