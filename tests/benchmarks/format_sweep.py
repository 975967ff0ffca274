"""One table over all FP8 formats of linear layers: rounding error, mismatch, gradients, memory.

    python -m tests.benchmarks.format_sweep [--model FOLDER] [--seeds 0 1 2] [--outliers 1 1024]

A BF16 model samples answers to additions; the same tokens are then scored by the BF16 model (p) and by the model whose
decoder linears compute in the format (q), in whole-sequence passes, so that nothing but the format differs. Columns:

- weights, activations: relative RMS error of the quantised tensors (root of summed squared errors over summed squares,
  all quantised layers), and the largest error as a share of its element's bound (`error_bound`; at most 1);
- token_mult_prob_error and gen_kl of d = p - q;
- gradient: norm of the difference of all weight gradients of the quantised layers from those in BF16, relative, for
  the mean -logprob of all tokens, questions included, with output gradients in E4M3 and in E5M2;
- bytes a weight: codes and scales.

Values are medians over `--seeds`; without `--model` each seed has its own small Qwen3 model, trained on additions for
`--warm-steps` steps. A small model reads few different tokens, so that one unlucky rounding recurs: see the maxima.
A factor of `--outliers` multiplies four channels of every norm's output and divides the columns behind them: a power
of two leaves the BF16 model as it is, and gives its activations the outlier channels of large models.
The history of tensor_delayed holds one update, on other tokens of the same task.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer

from conf.schema import LinearPrecision, TinyArchitecture, WarmStart
from infra.provenance import versions
from tasks.engines.precision_plan import block_spec, plan_linears
from tasks.engines.torch_attention import WholeSequenceAttention, install_hook
from tasks.engines.torch_linears import Fp8TrainingLinear, advance_delayed, use_fp8_training
from tasks.engines.torch_models import forward_logits, loaded_model
from tasks.engines.warm_start import Demonstration, WarmStartSpec, cached_warm_start
from tasks.numerics.fp8 import dequantize, error_bound, quantize_as
from tasks.numerics.logprobs import sample_tokens, token_logprobs, uniforms
from tasks.numerics.mismatch import log_ratios, mismatch_metrics

CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("block, fp32", {}),
    ("block, power of two", {"scale": "power_of_two"}),
    ("tensor, fp32", {"scaling": "tensor"}),
    ("tensor, power of two", {"scaling": "tensor", "scale": "power_of_two"}),
    ("tensor_delayed, fp32", {"scaling": "tensor_delayed"}),
    ("channel, fp32", {"scaling": "channel"}),
    ("mxfp8, E8M0", {"scaling": "mxfp8"}),
)
_NORMS = {
    "input_layernorm": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "post_attention_layernorm": ("mlp.gate_proj", "mlp.up_proj"),
}


@dataclass(frozen=True)
class Batch:
    """`tokens` int64 and `mask` (answers) `[rows, width]`."""

    tokens: Tensor
    mask: Tensor


def small_model(cache: Path, steps: int, seed: int) -> Path:
    """Folder of the small model, trained on additions."""
    examples = tuple(Demonstration(f"{a} + {b} = ", str(a + b)) for a in range(40) for b in range(25))
    training = WarmStart(steps=steps, batch_size=64, learning_rate=2e-3, seed=seed)
    spec = WarmStartSpec(TinyArchitecture(), training, examples, torch.get_num_threads())
    return cached_warm_start(spec, cache, lambda step, loss: None)[0]


def with_outliers(model: nn.Module, factor: float, channels: int = 4) -> None:
    """Move `factor` from the columns of linears into the norm before them, for the first `channels` of each norm."""
    with torch.no_grad():
        for layer in model.get_submodule("model.layers").children():
            for norm, behind in _NORMS.items():
                layer.get_parameter(f"{norm}.weight")[:channels] *= factor
                for name in behind:
                    layer.get_parameter(f"{name}.weight")[:, :channels] /= factor


@torch.no_grad()
def sampled(model: Any, tokenizer: Any, rows: int, new_tokens: int, seed: int) -> Batch:
    """Answers of the model to additions of two-digit numbers, at temperature 1."""
    numbers = torch.randint(10, 100, (rows, 2), generator=torch.Generator().manual_seed(seed)).tolist()
    tokens = torch.tensor([tokenizer.encode(f"{a} + {b} = ") for a, b in numbers])
    uniform = uniforms([seed * rows + row for row in range(rows)], new_tokens)
    mask, running = torch.zeros(tokens.shape, dtype=torch.bool), torch.ones(rows, dtype=torch.bool)
    for step in range(new_tokens):
        logits = forward_logits(model, tokens, torch.arange(tokens.shape[1]).unsqueeze(0))[:, -1]
        new = sample_tokens(logits, 1.0, uniform[:, step])[0]
        tokens, mask = torch.cat([tokens, new.unsqueeze(1)], 1), torch.cat([mask, running.unsqueeze(1)], 1)
        running = running & (new != tokenizer.eos_token_id)
    return Batch(tokens, mask)


def logprobs(model: Any, batch: Batch) -> Tensor:
    """Of all tokens but the first, `[rows, width]`, 0 there."""
    logits = forward_logits(model, batch.tokens, torch.arange(batch.tokens.shape[1]).unsqueeze(0))
    found = token_logprobs(logits[:, :-1], batch.tokens[:, 1:], 1.0)
    return nn.functional.pad(found, (1, 0))


def gradients(model: Any, names: tuple[str, ...], batch: Batch) -> Tensor:
    """All weight gradients of the named layers, flat fp64, of the mean -logprob of all tokens."""
    model.zero_grad()
    (-logprobs(model, batch).mean()).backward()
    grads = (model.get_parameter(f"{name}.weight").grad for name in names)
    return torch.cat([g.double().flatten() for g in grads if g is not None])


def layer_inputs(model: Any, names: tuple[str, ...], batch: Batch) -> dict[str, Tensor]:
    """What each named layer reads, `[tokens, features]`."""
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Any:
        return lambda _, inputs: seen.update({name: inputs[0].detach().flatten(0, -2)})

    hooks = [model.get_submodule(name).register_forward_pre_hook(keep(name)) for name in names]
    with torch.no_grad():
        logprobs(model, batch)
    for hook in hooks:
        hook.remove()
    return seen


@dataclass
class Error:
    """Squared errors and squares summed over tensors, and the largest error over its bound."""

    squared: float = 0.0
    squares: float = 0.0
    worst: float = 0.0

    def add(self, x: Tensor, layer: Fp8TrainingLinear, weight: bool) -> None:
        fmt = layer.spec.weight_format if weight else layer.spec.activation_format
        scales, operand = layer.delayed_scales(), "weight" if weight else "input"
        encode = None if scales is None else scales.encode(x, operand, fmt, record=False)  # type: ignore[arg-type]
        q = quantize_as(x, fmt, encode)
        error, bound = (dequantize(q).double() - x.double()).abs(), error_bound(x, q)
        self.squared += float(error.square().sum())
        self.squares += float(x.double().square().sum())
        self.worst = max(self.worst, float((error / bound).max()))

    @property
    def relative(self) -> float:
        return (self.squared / self.squares) ** 0.5


@dataclass(frozen=True)
class Row:
    """One format on one model; fields as the columns."""

    weights: float
    weights_worst: float
    activations: float
    activations_worst: float
    mult_prob_error: float
    gen_kl: float
    gradient_e4m3: float
    gradient_e5m2: float
    bytes_a_weight: float


def in_format(model: Any, names: tuple[str, ...], precision: LinearPrecision, past: Batch) -> Any:
    """A copy of the model whose named layers compute in the format; histories filled from `past`."""
    made = copy.deepcopy(model)
    install_hook(made, WholeSequenceAttention())
    use_fp8_training(made, names, block_spec(precision))
    if precision.scaling == "tensor_delayed":
        gradients(made, names, past)
        advance_delayed(made)
    return made


def measure(model: Any, batch: Batch, past: Batch) -> list[Row]:
    """A row for each of `CASES`."""
    names = plan_linears(model, LinearPrecision(format="e4m3")).quantized
    inputs, exact = layer_inputs(model, names, batch), gradients(model, names, batch)
    with torch.no_grad():
        p = logprobs(model, batch)
    weights, rows = sum(model.get_parameter(f"{name}.weight").numel() for name in names), []
    for _, keys in CASES:
        made = in_format(model, names, LinearPrecision(format="e4m3", **keys), past)
        hybrid = in_format(model, names, LinearPrecision(format="e4m3", gradient_format="e5m2", **keys), past)
        of_weights, of_inputs, size = Error(), Error(), 0
        for name in names:
            layer = made.get_submodule(name)
            of_weights.add(layer.weight.detach(), layer, weight=True)
            of_inputs.add(inputs[name], layer, weight=False)
            size += layer.spec.weight_format.nbytes(tuple(layer.weight.shape))
        with torch.no_grad():
            metrics = mismatch_metrics(log_ratios(p, logprobs(made, batch), batch.mask))
        rows.append(
            Row(
                of_weights.relative,
                of_weights.worst,
                of_inputs.relative,
                of_inputs.worst,
                metrics["mismatch/token_mult_prob_error"],
                metrics["mismatch/gen_kl"],
                *(float((gradients(m, names, batch) - exact).norm() / exact.norm()) for m in (made, hybrid)),
                size / weights,
            )
        )
    return rows


def table(runs: list[list[Row]]) -> str:
    """Markdown: a line a format; median over the runs, and the largest where it says max."""
    lines = [
        "| format | weights rel. RMS | max / bound | activations rel. RMS | max / bound | token_mult_prob_error (max) "
        "| gen_kl (max) | gradient, e4m3 | gradient, e5m2 | bytes a weight |",
        "|---|" + "---:|" * 9,
    ]
    for (label, _), of in zip(CASES, zip(*runs, strict=True), strict=True):

        def mid(field: str, of: tuple[Row, ...] = of) -> float:
            return statistics.median(getattr(row, field) for row in of)

        def top(field: str, of: tuple[Row, ...] = of) -> float:
            return max(getattr(row, field) for row in of)

        lines.append(
            f"| {label} | {mid('weights'):.4f} | {top('weights_worst'):.3f} | {mid('activations'):.4f} "
            f"| {top('activations_worst'):.3f} | {mid('mult_prob_error'):.4f} ({top('mult_prob_error'):.4f}) "
            f"| {mid('gen_kl'):.1e} ({top('gen_kl'):.1e}) | {mid('gradient_e4m3'):.4f} | {mid('gradient_e5m2'):.4f} "
            f"| {mid('bytes_a_weight'):.4f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Print conditions and a table for each outlier factor."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder of a Hugging Face model; without it small ones are built")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="of models and questions")
    parser.add_argument("--warm-steps", type=int, default=150)
    parser.add_argument("--outliers", type=float, nargs="+", default=[1.0, 1024.0], help="factors, powers of two")
    parser.add_argument("--prompts", type=int, default=256)
    parser.add_argument("--new-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1)
    parsed = parser.parse_args()
    torch.set_num_threads(parsed.threads)
    runs: dict[float, list[list[Row]]] = {factor: [] for factor in parsed.outliers}
    tokens = 0
    for seed in parsed.seeds:
        with tempfile.TemporaryDirectory() as cache:
            folder = parsed.model or small_model(Path(cache), parsed.warm_steps, seed)
            model = loaded_model(folder, torch.bfloat16)
            tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        for factor in parsed.outliers:
            made = copy.deepcopy(model)
            install_hook(made, WholeSequenceAttention())
            with_outliers(made, factor)
            batch, past = (sampled(made, tokenizer, parsed.prompts, parsed.new_tokens, 2 * seed + k) for k in range(2))
            runs[factor].append(measure(made, batch, past))
            tokens += int(batch.mask.sum())
    source = parsed.model or f"small models, {parsed.warm_steps} warm-up steps"
    for factor in parsed.outliers:
        print(
            f"\n{source}; seeds {parsed.seeds}; outlier factor {factor:g}; {parsed.prompts} additions of up to "
            f"{parsed.new_tokens} new tokens ({tokens // len(runs) // len(parsed.seeds)} a seed), temperature 1; "
            f"CPU, BF16 compute\n\n{table(runs[factor])}"
        )
    print("\n" + ", ".join(f"{name} {version}" for name, version in versions().items()))


if __name__ == "__main__":
    main()
