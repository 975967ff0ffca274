"""Random prompts and rewards: lengths, shares, and that every run sees the same."""

from __future__ import annotations

import pytest

from conf.compose import compose
from conf.problems import ConfigError
from conf.schema import SyntheticData
from tasks.data.grading import Grader
from tasks.data.loading import load_dataset
from tasks.data.synthetic import score


def _config(*overrides: str) -> SyntheticData:
    data = compose(["data=synthetic", "model.warm_start=null", *overrides]).data
    assert isinstance(data, SyntheticData)
    return data


def test_prompts_have_the_asked_length_and_are_the_same_every_time() -> None:
    config = _config("data.prompt_digits=40", "data.pool_size=1000", "data.eval_prompts=16")
    dataset = load_dataset(config)
    examples = (*dataset.train, *dataset.eval)
    assert all(len(e.prompt) == 40 and e.prompt.isdigit() and not e.has_answer for e in examples)
    assert len({e.prompt for e in examples}) == len(examples) and len(dataset.eval) == 16
    assert dataset == load_dataset(config)


def test_a_short_prompt_collapses_to_what_there_is() -> None:
    config = _config("data.prompt_digits=4", "data.pool_size=20000", "data.eval_prompts=16", "data.eval_share=0.5")
    prompts = [e.prompt for e in load_dataset(config).train]
    assert len(set(prompts)) == len(prompts) < 10000


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_the_share_of_completions_that_score(share: float) -> None:
    entry = {"question": "1234", "metadata": {"reward_share": share}}
    scores = [score(f"answer {number}", entry) for number in range(4000)]
    assert set(scores) == {0.0, 1.0}
    # Within five standard deviations of the binomial.
    assert abs(sum(scores) / 4000 - share) < 5 * (share * (1 - share) / 4000) ** 0.5
    assert scores[:100] == [score(f"answer {number}", entry) for number in range(100)]
    other = {"question": "1235", "metadata": {"reward_share": share}}
    assert [score(f"answer {number}", other) for number in range(4000)] != scores


def test_it_is_graded_in_the_verifiers_process() -> None:
    dataset = load_dataset(_config("data.prompt_digits=8", "data.pool_size=100", "data.eval_prompts=4"))
    with Grader(dataset.grader, 5.0) as grader:
        grades = grader.grade([(dataset.train[0], f"a{number}") for number in range(64)])
    assert all(grade.error is None for grade in grades) and {grade.score for grade in grades} == {0.0, 1.0}


def test_no_warm_start_on_it() -> None:
    """It has no answers to learn from."""
    with pytest.raises(ConfigError, match=r"model\.warm_start = .*data\.kind synthetic has no answers"):
        compose(["data=synthetic"])
    compose(["data=synthetic", "model.warm_start=null"])


def test_a_prompt_leaves_room_for_an_answer() -> None:
    synthetic = ("data=synthetic", "model.warm_start=null", "rollout.max_new_tokens=12")
    compose([*synthetic, "data.prompt_digits=500"])
    with pytest.raises(ConfigError) as caught:
        compose([*synthetic, "data.prompt_digits=501"])
    assert caught.value.problems == (
        "data.prompt_digits = 501: with rollout.max_new_tokens 12 it exceeds the model's 512 positions; allowed: an "
        "integer from 4 to 500",
    )
