"""Procedural tasks: made in a process of their own, the same in every run, split without a leak."""

from __future__ import annotations

import pytest

from conf.schema import ReasoningGymData
from tasks.data.examples import DataError, GraderSpec
from tasks.data.grading import Grader
from tasks.data.loading import load_dataset
from tasks.data.reasoning_gym import draw_examples
from tasks.data.split import is_eval, normalise
from tasks.data.wire import WireError, decode, dumps, encode, loads

SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}


def _config(**values) -> ReasoningGymData:
    """Unchecked, because some of the refusals below are made by the schema as well."""
    base = ReasoningGymData(kind="reasoning_gym", task="chain_sum", parameters=SMALL_SUMS, pool_size=400)
    return base.model_copy(update=values)


def test_questions_answers_and_metadata_are_the_generators_own():
    import reasoning_gym

    own = reasoning_gym.create_dataset("chain_sum", **SMALL_SUMS, seed=0, size=5)
    drawn = draw_examples(_config(pool_size=5))
    assert [(e.prompt, e.answer, e.metadata) for e in drawn] == [
        (q["question"], q["answer"], q["metadata"]) for q in own
    ]


def test_small_task_space_collapses_and_does_not_leak():
    data = load_dataset(_config(pool_size=1500, eval_prompts=20))
    train, held_out = ({normalise(e.prompt) for e in side} for side in (data.train, data.eval))
    assert len(train) == len(data.train) and len(held_out) == len(data.eval) == 20
    assert not train & held_out
    assert len(train) <= 200  # 10 x 10 x 2 questions exist
    assert not any(is_eval(e.id, 0.2) for e in data.train)
    assert data.grader == GraderSpec("reasoning_gym", "chain_sum", SMALL_SUMS)


def test_generator_that_walks_over_sets_makes_the_same_questions_in_every_process():
    config = _config(task="isomorphic_strings", parameters={}, pool_size=20)
    assert draw_examples(config) == draw_examples(config)


def test_task_without_reference_answers_is_graded_all_the_same():
    examples = draw_examples(_config(task="propositional_logic", parameters={}, pool_size=3))
    assert [(e.answer, e.has_answer) for e in examples] == [("", False)] * len(examples)
    with Grader(GraderSpec("reasoning_gym", "propositional_logic", {}), 5.0) as grader:
        (grade,) = grader.grade([(examples[0], examples[0].metadata["example_answer"])])
    assert (grade.score, grade.solved, grade.error) == (1.0, True, None)


def test_metadata_with_tuples_reaches_the_verifier_unchanged():
    (example,) = draw_examples(_config(task="arc_1d", parameters={}, pool_size=1))
    (arc,) = draw_examples(_config(task="rearc", parameters={}, pool_size=1))
    assert isinstance(arc.metadata["output"], tuple)
    with Grader(GraderSpec("reasoning_gym", "rearc", {}), 5.0) as grader:
        assert [g.score for g in grader.grade([(arc, arc.answer)])] == [1.0]
    with Grader(GraderSpec("reasoning_gym", "arc_1d", {}), 5.0) as grader:
        assert [g.score for g in grader.grade([(example, example.answer)])] == [1.0]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"task": "chain_sums"},
            r"^data\.task='chain_sums' is no reasoning-gym task; nearest: 'chain_sum'; allowed: one of "
            r"the \d+ names in reasoning_gym\.factory\.DATASETS$",
        ),
        (
            {"parameters": {"min_term": 2}},
            r"^data\.parameters=\{'min_term': 2\} refused by task 'chain_sum': TypeError: .*'min_term'.*; "
            r"allowed: allow_negation, max_digits, max_terms, min_digits, min_terms$",
        ),
        (
            {"parameters": {"min_terms": 3, "max_terms": 2}},
            r"refused by task 'chain_sum': AssertionError: max_terms must be >= min_terms; allowed: ",
        ),
        (
            {"parameters": {"seed": 4}},
            r"^data\.parameters\.seed=4; allowed: parameters of the task except seed and size "
            r"\(the pool is the same for every run\)$",
        ),
        (
            {"parameters": {"size": 4}},
            r"^data\.parameters\.size=4; .* \(use data\.pool_size\)$",
        ),
        (
            {"parameters": {"min_digits": 2.5, "max_digits": 2.5}},
            r"^data\.task='chain_sum': its generator failed on question 0: \w+Error: ",
        ),
    ],
)
def test_bad_task_or_parameters_are_refused(values, message):
    with pytest.raises(DataError, match=message):
        draw_examples(_config(**values))


@pytest.mark.parametrize(
    "value",
    [
        {"a": (1, [2.5, None], ("x", True)), "b": {}},
        {1: "x", (2, 3): ["y"]},
        {"__tuple__": [1]},
        {"__pairs__": (1,), "other": 2},
        "\ud800 lone surrogate",
    ],
)
def test_wire_carries_values_exactly(value):
    back = decode(loads(dumps({"v": encode(value)}))["v"])
    assert back == value
    assert repr(back) == repr(value)


def test_wire_refuses_what_it_cannot_carry():
    with pytest.raises(WireError) as caught:
        encode({"a": [1, {2}]}, "metadata")
    assert str(caught.value) == ("metadata.a[1] is a set; allowed: None, bool, int, float, str, list, tuple, dict")
