"""How closely each optimiser precision follows fp32 master weights: the small model, same start and same data.

    python -m tests.benchmarks.kahan_comparison [--steps 100] [--rates 1e-5 1e-4] [--seed 0]

All start from the same BF16 weights and see the same batches (next token of noisy linear congruential sequences),
with constant learning rate, beta2 0.95, no weight decay and gradients clipped to norm 1. Columns:

- own: distance of the weights from the fp32-master run, over the distance that this run went from the start. Each
  run has gradients of its own, so this holds what rounding does to later gradients. The row `half batches`, also
  fp32 masters, differs from the first by summation order alone: closer than that is chance.
- replayed: the same with the gradients of the fp32-master run given to all: the optimiser's arithmetic alone.
- unmoved: share of the model's BF16 weights that still have their first value (own gradients).
- loss: mean over held-out batches after the last step; before it, the loss at the start.
- bytes: per parameter; BF16 weights of the model, masters, moments and compensation. Gradients add 4 to all.

Weights are masters, or BF16 weights plus their Kahan compensation.
"""

from __future__ import annotations

import argparse
import math
import platform
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import Parameter

from conf.schema import Optimizer, TinyArchitecture
from tasks.engines.optimizer_memory import optimizer_bytes
from tasks.engines.tiny_model import create_model
from tasks.engines.torch_optimizer import PolicyOptimizer, build_optimizer

CASES = (
    ("fp32_master", "fp32"),
    ("fp32_master", "bf16"),
    ("fp32_master", "fp8"),
    ("bf16_kahan", "fp32"),
    ("bf16_kahan", "bf16"),
    ("bf16_kahan", "fp8"),
    ("bf16", "fp32"),
    ("bf16", "bf16"),
    ("bf16", "fp8"),
)
SMALL = TinyArchitecture(hidden_size=128, intermediate_size=256, num_attention_heads=2, num_key_value_heads=1)
MODULUS = 97


@dataclass(frozen=True)
class Setting:
    """One comparison; `rows` x `length` tokens a batch."""

    architecture: TinyArchitecture
    steps: int
    rate: float
    seed: int = 0
    rows: int = 16
    length: int = 32


@dataclass(frozen=True)
class Row:
    """Result of one case; see the module's text."""

    weights: str
    state: str
    own: float
    replayed: float
    unmoved: float
    loss: float
    bytes_per_parameter: float


class Run:
    """One model with its optimiser."""

    def __init__(self, setting: Setting, weights: str, state: str) -> None:
        self.model = create_model(setting.architecture, setting.seed, 1).to(torch.bfloat16)
        self.parameters: dict[str, Parameter] = dict(self.model.named_parameters())
        self.start = {name: p.detach().clone() for name, p in self.parameters.items()}
        self.settings = Optimizer.model_validate(
            {"learning_rate": setting.rate, "warmup_steps": 0, "weights": weights, "state": state}
        )
        self.optimizer: PolicyOptimizer = build_optimizer(self.parameters, lambda: self.start, self.settings)

    def loss(self, tokens: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens[:, :-1]).logits.to(torch.float32)
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def gradients(self, tokens: Tensor) -> list[Tensor]:
        return list(torch.autograd.grad(self.loss(tokens), list(self.parameters.values())))

    def apply(self, gradients: Sequence[Tensor]) -> None:
        """Accumulate these BF16 gradients exactly, as a backward pass would."""
        for parameter, gradient in zip(self.parameters.values(), gradients, strict=True):
            (parameter * gradient).sum().backward()

    def effective(self) -> dict[str, Tensor]:
        state = self.optimizer.state_tensors()
        found = {name: weight.to(torch.float64) for name, weight in self.optimizer.weights().items()}
        return {n: w + state[f"{n}.compensation"] if f"{n}.compensation" in state else w for n, w in found.items()}

    def unmoved(self) -> float:
        same = sum(int((p == self.start[name]).sum()) for name, p in self.parameters.items())
        return same / sum(p.numel() for p in self.parameters.values())

    @torch.no_grad()
    def held_out(self, setting: Setting) -> float:
        return sum(float(self.loss(batch(setting, -number))) for number in range(1, 5)) / 4


def batch(setting: Setting, number: int) -> Tensor:
    """Tokens `[rows, length]`: x -> 5 x + 3 mod 97, one token in eight replaced at random. A pure function."""
    generator = torch.Generator().manual_seed(1_000_003 * (setting.seed + 1) + number)
    column = torch.randint(MODULUS, (setting.rows,), generator=generator)
    columns = [column]
    for _ in range(setting.length - 1):
        stray = torch.randint(8, (setting.rows,), generator=generator) == 0
        random = torch.randint(MODULUS, (setting.rows,), generator=generator)
        column = torch.where(stray, random, (5 * column + 3) % MODULUS)
        columns.append(column)
    return torch.stack(columns, 1) + 3


def distance(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """L2 norm of the difference over all weights, fp64."""
    return math.sqrt(sum(float((a[name].double() - b[name].double()).square().sum()) for name in b))


def compare(setting: Setting, cases: Sequence[tuple[str, str]] = CASES) -> tuple[float, list[Row]]:
    """Loss at the start, and one row a case plus the row of half batches (second)."""
    reference = Run(setting, "fp32_master", "fp32")
    halves = Run(setting, "fp32_master", "fp32")
    own = [Run(setting, *case) for case in cases]
    replayed = [Run(setting, *case) for case in cases]
    first_loss = reference.held_out(setting)
    for number in range(setting.steps):
        tokens = batch(setting, number)
        gradients = reference.gradients(tokens)
        for run in (reference, *replayed):
            run.apply(gradients)
            run.optimizer.step()
        for part in tokens.chunk(2):
            (halves.loss(part) / 2).backward()
        halves.optimizer.step()
        for run in own:
            run.loss(tokens).backward()
            run.optimizer.step()
    goal = reference.effective()
    travelled = distance(goal, reference.start)
    rows = []
    for (weights, state), mine, given in zip(cases, own, replayed, strict=True):
        held = optimizer_bytes([p.shape for p in mine.parameters.values()], mine.settings)
        elements = sum(p.numel() for p in mine.parameters.values())
        rows.append(
            Row(
                weights,
                state,
                own=distance(mine.effective(), goal) / travelled,
                replayed=distance(given.effective(), goal) / travelled,
                unmoved=mine.unmoved(),
                loss=mine.held_out(setting),
                bytes_per_parameter=2 + (held.master + held.state) / elements,
            )
        )
    floor = distance(halves.effective(), goal) / travelled
    rows.insert(
        1,
        Row(
            "half batches", "fp32", floor, 0.0, halves.unmoved(), halves.held_out(setting), rows[0].bytes_per_parameter
        ),
    )
    return first_loss, rows


def table(rows: Sequence[Row]) -> str:
    """One line a row."""
    lines = [f"{'weights':13} {'state':5} {'own':>9} {'replayed':>9} {'unmoved':>8} {'loss':>8} {'bytes':>6}"]
    for r in rows:
        lines.append(
            f"{r.weights:13} {r.state:5} {r.own:9.5f} {r.replayed:9.5f} {r.unmoved:8.3f} {r.loss:8.4f} "
            f"{r.bytes_per_parameter:6.2f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print one table for each learning rate."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    for rate in parsed.rates:
        setting = Setting(SMALL, parsed.steps, rate, parsed.seed)
        loss, rows = compare(setting)
        print(
            f"rate {rate:g}, {setting.steps} steps of {setting.rows}x{setting.length} tokens, seed {setting.seed}, "
            f"loss at the start {loss:.4f}; torch {torch.__version__}, {platform.machine()} CPU"
        )
        print(table(rows), flush=True)


if __name__ == "__main__":
    main()
