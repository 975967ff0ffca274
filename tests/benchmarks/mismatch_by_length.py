"""Where the mismatch of a recipe comes from on CPU: random prompts of growing length, one model.

    python -m tests.benchmarks.mismatch_by_length MODEL_DIR [--rows 64] [--lengths 8 16 32 64 128]

Samples 16 tokens after each prompt, scores them with the trainer at the same weights, and prints
`mismatch/token_mult_prob_error` and the share of tokens whose two log-probabilities are bitwise equal.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from conf.compose import compose
from tasks.actors import RolloutActor, TrainerActor
from tasks.engines.protocols import GenerateRequest, Prompt, TokenRows

RECIPES = ("bf16", "fp8_rollout", "fp8_rollout_kv", "fp8_e2e", "fp8_e2e_kv")


def measure(recipe: str, model_dir: Path, rows: int, length: int) -> tuple[float, float]:
    """Token multiplicative probability error, and the share of tokens with d exactly 0."""
    config = compose([f"recipe={recipe}"])
    trainer, rollout = TrainerActor(), RolloutActor()
    trainer.build(config, str(model_dir))
    rollout.build(config, config.recipe, str(model_dir))
    generator = torch.Generator().manual_seed(length)
    tokens = torch.randint(3, 200, (rows, length), generator=generator)
    if config.recipe.calibration.enabled:
        trainer.calibrate(TokenRows(tokens, torch.full((rows,), length)))
    rollout.load_weights(trainer.export_weights(config.recipe)[1])
    prompts = tuple(Prompt(str(i), tuple(row), (i,)) for i, row in enumerate(tokens.tolist()))
    _, batch = rollout.generate(GenerateRequest(0, prompts, 16, 1.0, (255,)))
    metrics, logprobs = trainer.score(batch)
    mask = batch.response_mask()
    same = (logprobs[mask] == batch.logprobs[mask]).double().mean()
    return metrics["mismatch/token_mult_prob_error"], float(same)


def main() -> None:
    """Print one line for each recipe and prompt length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model_dir", type=Path)
    parser.add_argument("--lengths", type=int, nargs="+", default=[8, 16, 32, 64, 128])
    parser.add_argument("--rows", type=int, default=64, help="sequences decoded together")
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES), choices=RECIPES)
    parsed = parser.parse_args()
    for recipe in parsed.recipes:
        for length in parsed.lengths:
            error, same = measure(recipe, parsed.model_dir, parsed.rows, length)
            print(
                f"{recipe:15} rows {parsed.rows:4}  prompt {length:4}  mismatch {error:.5f}  bitwise equal {same:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
