"""From a data config to a split dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tasks.data import jsonl, reasoning_gym, synthetic
from tasks.data.examples import DataError, Dataset, Example
from tasks.data.split import is_eval

if TYPE_CHECKING:
    from conf.schema import JsonlData, ReasoningGymData, SyntheticData


def load_dataset(config: ReasoningGymData | JsonlData | SyntheticData) -> Dataset:
    """Read or make the examples and split them. The same for every run seed.

    Eval holds exactly `eval_prompts` examples, the ones with the smallest ids: a smaller eval set is part
    of a larger one, and the order of the source does not matter. Further prompts on the eval side are
    left unused.

    Raises DataError (see the readers), also when a side of the split is too small.
    """
    if config.kind == "reasoning_gym":
        examples, grader = reasoning_gym.draw_examples(config), reasoning_gym.verifier(config)
    elif config.kind == "synthetic":
        examples, grader = synthetic.draw_examples(config), synthetic.verifier()
    else:
        examples, grader = jsonl.read_examples(config), jsonl.verifier()
    train = tuple(e for e in examples if not is_eval(e.id, config.eval_share))
    held_out = sorted((e for e in examples if is_eval(e.id, config.eval_share)), key=lambda e: e.id)
    _check_sizes(config, examples, len(train), len(held_out))
    return Dataset(train=train, eval=tuple(held_out[: config.eval_prompts]), grader=grader)


def _check_sizes(
    config: ReasoningGymData | JsonlData | SyntheticData, examples: list[Example], train: int, held_out: int
) -> None:
    source = "data.path" if config.kind == "jsonl" else "data.pool_size"
    counts = f"{len(examples)} distinct prompts at data.eval_share={config.eval_share}"
    if held_out < config.eval_prompts:
        raise DataError(
            f"data.eval_prompts={config.eval_prompts}: need {config.eval_prompts} prompts on the eval side, "
            f"have {held_out} ({counts}); allowed: at most {held_out}, or more data ({source}), "
            "or a larger share"
        )
    if train < 1:
        raise DataError(
            f"data.eval_share={config.eval_share}: need 1 prompt on the train side, have 0 ({counts}); "
            f"allowed: a smaller share or more data ({source})"
        )
