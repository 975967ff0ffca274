"""Question/answer files."""

from __future__ import annotations

import json
import logging
import re

import pytest

from conf.schema import JsonlData
from tasks.data.examples import DataError, GraderSpec
from tasks.data.jsonl import read_examples
from tasks.data.loading import load_dataset
from tasks.data.split import is_eval, prompt_id

GOOD = '{"question": "1 + 1?", "answer": "2"}\n'


def _config(path, **values) -> JsonlData:
    return JsonlData(kind="jsonl", path=str(path), **values)


def _write(tmp_path, text: str | bytes):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_reference_is_what_follows_the_last_mark(tmp_path):
    rows = [
        {"question": "How many?", "answer": "6 * 7 = 42 #### no\n#### 42 "},
        {"question": "And now?", "answer": " 1,000 "},
    ]
    path = _write(tmp_path, "\n".join(json.dumps(row) for row in rows))
    examples = read_examples(_config(path))
    assert [(e.prompt, e.answer) for e in examples] == [("How many?\n", "42"), ("And now?\n", "1,000")]
    assert [e.id for e in examples] == [prompt_id("How many?"), prompt_id("And now?")]
    assert [e.metadata for e in examples] == [{"line": 1}, {"line": 2}]


def test_keys_and_template_come_from_the_config(tmp_path):
    path = _write(tmp_path, '{"q": "2 + {3}", "a": "5", "more": 1}\n')
    config = _config(path, question_key="q", answer_key="a", prompt_template="{x} Q: {question}\nA:")
    assert [(e.prompt, e.answer) for e in read_examples(config)] == [("{x} Q: 2 + {3}\nA:", "5")]


def test_line_separators_inside_strings_bom_and_blank_end_are_fine(tmp_path):
    text = '\ufeff{"question": "a\u2028b\\nc", "answer": "1"}\r\n{"question": "d", "answer": "2"}\r\n\n  \n'
    examples = read_examples(_config(_write(tmp_path, text), prompt_template="{question}"))
    assert [e.prompt for e in examples] == ["a\u2028b\nc", "d"]


@pytest.mark.parametrize(
    ("row", "line", "problem"),
    [
        ('{"question": "x", "answer": "1"', 2, "not JSON (Expecting ',' delimiter"),
        ("[1, 2]", 2, "a JSON array; allowed: a JSON object with 'question' and 'answer'"),
        ('{"question": "x", "anser": "1"}', 2, "key 'answer' is missing; the row has 'question', 'anser'"),
        ("{}", 2, "key 'question' is missing; the row has none"),
        ('{"question": "x", "answer": 42}', 2, "key 'answer' is a JSON number; allowed: a string"),
        ('{"question": null, "answer": "1"}', 2, "key 'question' is a JSON null; allowed: a string"),
        ('{"question": "x", "answer": true}', 2, "key 'answer' is a JSON boolean; allowed: a string"),
        ('{"question": " ", "answer": "1"}', 2, "key 'question' is empty; allowed: a string with text"),
        ('{"question": "x", "answer": ""}', 2, "key 'answer' is empty; allowed: a string with text"),
        (
            '{"question": "x", "answer": "so ####  "}',
            2,
            "key 'answer' is empty after '####'; allowed: a reference there",
        ),
        ("", 2, "empty line; allowed: one JSON object on each line"),
        ("[" * 100_000, 2, "not JSON ("),
    ],
)
def test_malformed_row_names_file_line_and_problem(tmp_path, row, line, problem):
    path = _write(tmp_path, f"{GOOD}{row}\n{GOOD}")
    with pytest.raises(DataError, match=f"^{re.escape(f'{path}:{line}: {problem}')}"):
        read_examples(_config(path))


def test_row_that_is_not_utf8_names_file_and_line(tmp_path):
    path = _write(tmp_path, GOOD.encode() + b'{"question": "\xff", "answer": "1"}\n')
    with pytest.raises(DataError) as caught:
        read_examples(_config(path))
    assert str(caught.value) == f"{path}:2: not UTF-8 (byte 15 of the line)"


def test_missing_file_names_key_and_path(tmp_path):
    path = tmp_path / "nowhere.jsonl"
    with pytest.raises(DataError) as caught:
        read_examples(JsonlData.model_construct(path=str(path), prompt_template="{question}"))
    assert str(caught.value) == (
        f"data.path={str(path)!r}; allowed: a readable JSON lines file (No such file or directory)"
    )


def test_template_without_the_question_is_refused(tmp_path):
    config = _config(_write(tmp_path, GOOD)).model_copy(update={"prompt_template": "Q:"})
    with pytest.raises(DataError) as caught:
        read_examples(config)
    assert str(caught.value) == "data.prompt_template='Q:'; allowed: text with {question} in it"


def test_duplicate_prompts_collapse_to_the_first_and_contradictions_are_counted(tmp_path, caplog):
    rows = '{"question": "A b", "answer": "1"}\n{"question": "a  B", "answer": "1"}\n'
    path = _write(tmp_path, rows + '{"question": "a b", "answer": "2"}\n')
    with caplog.at_level(logging.WARNING):
        examples = read_examples(_config(path))
    assert [(e.prompt, e.answer) for e in examples] == [("A b\n", "1")]
    assert caplog.messages == [f"{path}: 1 rows repeat an earlier prompt with another answer; the first is used"]


def _many(tmp_path, count: int = 200):
    lines = [json.dumps({"question": f"{i} + {i}?", "answer": str(2 * i)}) for i in range(count)]
    return _write(tmp_path, "\n".join(lines))


def test_loaded_file_is_split_by_prompt_hash_alone(tmp_path):
    data = load_dataset(_config(_many(tmp_path), eval_prompts=20, eval_share=0.3))
    assert len(data.eval) == 20
    assert [e.id for e in data.eval] == sorted(e.id for e in data.eval)
    assert all(is_eval(e.id, 0.3) for e in data.eval)
    expected = [p for p in (f"{i} + {i}?\n" for i in range(200)) if not is_eval(prompt_id(p), 0.3)]
    assert [e.prompt for e in data.train] == expected
    assert data.grader == GraderSpec("math_verify")


def test_smaller_eval_set_is_part_of_the_larger_and_train_stays(tmp_path):
    path = _many(tmp_path)
    small = load_dataset(_config(path, eval_prompts=10, eval_share=0.3))
    large = load_dataset(_config(path, eval_prompts=20, eval_share=0.3))
    assert large.eval[:10] == small.eval
    assert large.train == small.train


def test_too_few_eval_prompts_names_key_need_and_have(tmp_path):
    path = _many(tmp_path)
    have = sum(is_eval(prompt_id(f"{i} + {i}?"), 0.1) for i in range(200))
    with pytest.raises(DataError) as caught:
        load_dataset(_config(path, eval_prompts=64, eval_share=0.1))
    assert str(caught.value) == (
        f"data.eval_prompts=64: need 64 prompts on the eval side, have {have} (200 distinct prompts at "
        f"data.eval_share=0.1); allowed: at most {have}, or more data (data.path), or a larger share"
    )


def test_empty_train_side_is_refused(tmp_path):
    path = _write(tmp_path, GOOD)
    with pytest.raises(DataError) as caught:
        load_dataset(_config(path, eval_prompts=1, eval_share=1 - 1e-9))
    assert str(caught.value) == (
        "data.eval_share=0.999999999: need 1 prompt on the train side, have 0 (1 distinct prompts at "
        "data.eval_share=0.999999999); allowed: a smaller share or more data (data.path)"
    )
