"""Identity of prompts, the split and the draw order."""

from __future__ import annotations

import hashlib
from collections import Counter

import pytest

from tasks.data.examples import DataError, Dataset, Example, GraderSpec
from tasks.data.split import epoch_slice, is_eval, normalise, prompt_id


def _dataset(population: int) -> Dataset:
    train = tuple(Example(id=f"{i:016x}", prompt=str(i), answer=str(i)) for i in range(population))
    return Dataset(train=train, eval=(), grader=GraderSpec("math_verify"))


def _draws(population: int, size: int, batches: int, start: int = 0, seed: int = 3) -> list[list[int]]:
    data = _dataset(population)
    return [[int(e.prompt) for e in data.batch(seed, start + b * size, size)] for b in range(batches)]


def test_normalise_folds_case_white_space_and_unicode_form():
    assert normalise("  What\tis \n 2 + 2 ?\u00a0") == "what is 2 + 2 ?"
    assert normalise("\uff12\uff0b\uff12") == "2+2"
    assert normalise("Stra\u00dfe") == normalise("STRASSE") == "strasse"
    assert normalise("cafe\u0301") == normalise("CAF\u00c9") == "caf\u00e9"


def test_normalise_is_idempotent_where_case_folding_undoes_the_unicode_form():
    for text in ("\u0345\u0301", "\u1e9e", "\u03d3\u0301", "\u0130"):
        assert normalise(normalise(text)) == normalise(text)


def test_prompt_id_is_the_head_of_the_sha256_of_the_normalised_prompt():
    assert prompt_id(" 1 +  1 = ") == hashlib.sha256(b"1 + 1 =").hexdigest()[:16]
    assert prompt_id("\ud800") == prompt_id(" \ud800")


def test_is_eval_compares_the_id_as_a_fraction_of_the_hash_space():
    assert is_eval("3fffffffffffffff", 0.25)
    assert not is_eval("4000000000000000", 0.25)
    assert is_eval("0000000000000000", 1e-9)
    assert not is_eval("ffffffffffffffff", 0.999)


def test_share_of_eval_ids_is_near_the_key():
    share = sum(is_eval(prompt_id(f"question {i}"), 0.2) for i in range(5000)) / 5000
    assert abs(share - 0.2) < 0.023  # four standard deviations


def test_batch_is_a_pure_function_of_seed_and_cursor():
    data = _dataset(50)
    assert data.batch(1, 70, 16) == data.batch(1, 70, 16)
    assert data.batch(1, 70, 16) != data.batch(2, 70, 16)
    assert data.batch(1, 0, 16) != data.batch(1, 50, 16)


def test_draw_order_is_pinned():
    # A change of this order breaks the resumption of every older run.
    assert epoch_slice(seed=0, cursor=0, size=8, population=8) == [7, 1, 5, 2, 4, 6, 0, 3]
    assert epoch_slice(seed=0, cursor=8, size=8, population=8) == [4, 2, 1, 0, 5, 3, 7, 6]


def test_smaller_batches_inside_an_epoch_make_up_the_larger_one():
    data = _dataset(64)
    assert data.batch(5, 0, 8) + data.batch(5, 8, 8) == data.batch(5, 0, 16)


@pytest.mark.parametrize(
    ("population", "size"), [(50, 16), (16, 16), (17, 16), (31, 16), (32, 16), (33, 16), (7, 5), (5, 1)]
)
@pytest.mark.parametrize("start", [0, 3])
def test_each_prompt_once_per_epoch_and_no_prompt_twice_in_a_batch(population, size, start):
    start %= size
    batches = _draws(population, size, batches=-(-6 * population // size), start=start)
    assert all(len(set(batch)) == size for batch in batches)
    flat = [i for batch in batches for i in batch]
    for border in range(population, start + len(flat) - population, population):
        assert sorted(flat[border - start : border - start + population]) == list(range(population))


def test_epochs_come_in_different_orders():
    flat = [i for batch in _draws(40, 10, 12) for i in batch]
    assert len({tuple(flat[e * 40 : e * 40 + 40]) for e in range(3)}) == 3


def test_batch_larger_than_the_train_set_repeats_as_little_as_possible():
    counts = Counter(i for batch in _draws(6, 16, 1) for i in batch)
    assert sorted(counts.values()) == [2, 2, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("population", "cursor", "size", "message"),
    [
        (4, 0, 0, "batch size=0; allowed: an integer >= 1"),
        (4, -1, 2, "batch cursor=-1; allowed: an integer >= 0"),
        (0, 0, 2, "batch from an empty train set; allowed: at least 1 example"),
    ],
)
def test_batch_refuses_bad_arguments(population, cursor, size, message):
    with pytest.raises(DataError) as caught:
        _dataset(population).batch(0, cursor, size)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"kind": "regex"}, "grader kind='regex'; allowed: reasoning_gym, math_verify, callable"),
        (
            {"kind": "callable", "target": "no_function"},
            "grader target='no_function'; allowed: 'package.module:function'",
        ),
        ({"kind": "math_verify", "memory_limit_mb": 0}, "grader memory_limit_mb=0; allowed: >= 1, or None"),
    ],
)
def test_grader_spec_refuses_bad_values(kwargs, message):
    with pytest.raises(DataError) as caught:
        GraderSpec(**kwargs)
    assert str(caught.value) == message
