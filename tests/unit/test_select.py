"""Choosing groups for a step and putting their samples together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from conf.schema import Algorithm, DynamicSampling
from tasks.calls import PhaseError
from tasks.engines.batches import gather_groups
from tasks.engines.protocols import RolloutBatch
from tasks.select import choose_groups, selection, selection_metrics

SOLVED, FAILED, MIXED = [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]


def rewards(*groups: list[float]) -> Tensor:
    return torch.tensor(groups, dtype=torch.float64)


def numbers(groups: tuple[Tensor, ...]) -> list[list[int]]:
    return [g.tolist() for g in groups]


def batch(first_token: int, groups: int, width: int) -> RolloutBatch:
    samples = groups * 2
    tokens = torch.arange(first_token, first_token + samples).unsqueeze(1).expand(samples, width).contiguous()
    return RolloutBatch(
        tokens=tokens,
        prompt_lengths=torch.full((samples,), 1),
        response_lengths=torch.full((samples,), width - 1),
        logprobs=torch.full((samples, width), -0.5),
        truncated=torch.arange(samples) % 2 == 0,
        weight_version=torch.full((samples,), 3),
    )


def graded(values: Tensor, penalty: float = 0.0) -> dict[str, Any]:
    shaped = values - penalty * torch.tensor([[0.0, 1.0]])
    lengths = torch.full(values.shape, 2)
    return {
        "rewards": values,
        "shaped": shaped,
        "lengths": lengths,
        "timed_out": 1,
        "verifier_errors": 0,
        "seconds": 0.1,
    }


def algorithm(prompts: int, **dynamic: Any) -> Algorithm:
    settings = DynamicSampling(enabled=True, **dynamic)
    return Algorithm(group_size=2, prompts_per_step=prompts, dynamic_sampling=settings)


def test_without_dynamic_sampling_the_first_groups_are_taken_as_they_come() -> None:
    choice = choose_groups([rewards(SOLVED, MIXED, FAILED)], 3, only_informative=False)
    assert numbers(choice.groups) == [[0, 1, 2]]
    assert choice.filled == 0


def test_informative_groups_of_later_batches_replace_equal_ones_in_order() -> None:
    choice = choose_groups([rewards(SOLVED, MIXED, FAILED), rewards(MIXED, FAILED, MIXED)], 3, only_informative=True)
    assert numbers(choice.groups) == [[1], [0, 2]]
    assert choice.filled == 0


def test_surplus_groups_are_left_out_from_the_end() -> None:
    choice = choose_groups([rewards(FAILED, MIXED), rewards(MIXED, MIXED)], 2, only_informative=True)
    assert numbers(choice.groups) == [[1], [0]]


def test_a_step_that_lacks_groups_is_filled_with_equal_ones_and_says_so() -> None:
    choice = choose_groups([rewards(SOLVED, FAILED), rewards(FAILED, MIXED)], 2, only_informative=True)
    assert numbers(choice.groups) == [[0], [1]]
    assert choice.filled == 1


def test_gathered_rows_keep_their_samples_and_are_padded_with_nan() -> None:
    narrow, wide = batch(10, groups=2, width=3), batch(50, groups=2, width=5)
    merged = gather_groups([narrow, wide], [torch.tensor([1]), torch.tensor([0])], 2)
    assert merged.tokens[:, 0].tolist() == [12, 13, 50, 51]
    assert merged.tokens[0].tolist() == [12, 12, 12, 0, 0]
    assert merged.logprobs[0, :3].tolist() == [-0.5] * 3 and bool(merged.logprobs[0, 3:].isnan().all())
    assert merged.response_lengths.tolist() == [2, 2, 4, 4]
    assert merged.truncated.tolist() == [True, False, True, False]
    assert merged.response_mask().sum(1).tolist() == [2, 2, 4, 4]


def test_gathering_ignores_the_width_of_a_batch_that_gives_nothing() -> None:
    merged = gather_groups(
        [batch(0, 1, 9), batch(7, 1, 3)], [torch.tensor([], dtype=torch.int64), torch.tensor([0])], 2
    )
    assert merged.tokens.shape == (2, 3)


def test_selected_step() -> None:
    parts = [graded(rewards(SOLVED, MIXED)), graded(rewards(MIXED, FAILED))]
    choice, advantages = selection(parts, algorithm(2))
    assert numbers(choice.groups) == [[1], [0]]
    half = 0.5 / (0.5**0.5 + 1e-6)
    torch.testing.assert_close(advantages, torch.tensor([-half, half, -half, half], dtype=torch.float64))
    assert selection_metrics(parts, choice, algorithm(2)) == {
        "reward/mean": 0.5,
        "reward/zero_variance_fraction": 0.5,
        "reward/timed_out": 2.0,
        "reward/verifier_errors": 0.0,
        "dynamic_sampling/generation_batches": 2.0,
        "dynamic_sampling/discarded_groups": 2.0,
        "dynamic_sampling/filled_groups": 0.0,
    }


def test_a_length_penalty_makes_no_group_informative_and_shapes_the_advantage() -> None:
    parts = [graded(rewards(SOLVED, MIXED), penalty=0.5), graded(rewards(MIXED, SOLVED), penalty=0.5)]
    choice, advantages = selection(parts, algorithm(2))
    assert numbers(choice.groups) == [[1], [0]]
    quarter = 0.25 / (0.125**0.5 + 1e-6)
    torch.testing.assert_close(advantages[:2], torch.tensor([-quarter, quarter], dtype=torch.float64))


def test_exhausted_sampling_fails_where_it_is_asked_to() -> None:
    limited = algorithm(2, max_generation_batches=1, when_exhausted="fail")
    with pytest.raises(
        PhaseError, match=r"1 of the 2 groups .* differ after 1 generation batches .*max_generation_batches = 1"
    ):
        selection([graded(rewards(SOLVED, MIXED))], limited)


def test_without_dynamic_sampling_no_metric_of_it_appears() -> None:
    plain = Algorithm(group_size=2, prompts_per_step=2)
    parts = [graded(rewards(SOLVED, MIXED))]
    choice, _ = selection(parts, plain)
    assert not any(name.startswith("dynamic_sampling/") for name in selection_metrics(parts, choice, plain))
