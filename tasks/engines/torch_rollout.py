"""The PyTorch rollout engine: decodes token by token with a KV cache, on CPU or any torch device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from conf.schema import Recipe, TorchRollout
from tasks.engines.groups import OpenGroups, drain
from tasks.engines.precision_plan import block_spec, plan_linears
from tasks.engines.protocols import (
    EngineReport,
    GenerateRequest,
    GroupStream,
    Prompt,
    RolloutBatch,
    SyncHeader,
    TokenRows,
)
from tasks.engines.rollout_checks import check_header, check_request, check_rows, check_version, forms_of
from tasks.engines.sync_steps import StepwiseSync
from tasks.engines.torch_attention import CachedAttention, install_hook, scale_heads
from tasks.engines.torch_linears import Fp8InferenceLinear, use_fp8_inference
from tasks.engines.torch_models import empty_model, forward_hidden, head_logits, weights
from tasks.numerics.fingerprint import fingerprints
from tasks.numerics.logprobs import greedy_tokens, sample_tokens, token_logprobs, uniforms


@dataclass
class _Decoded:
    """Responses of one decode batch: `tokens` and `logprobs` `[samples, steps]`, `lengths`, `truncated` `[samples]`."""

    tokens: Tensor
    logprobs: Tensor
    lengths: Tensor
    truncated: Tensor

    def responses(self) -> Iterator[list[int]]:
        for row, count in zip(self.tokens.tolist(), self.lengths.tolist(), strict=True):
            yield row[:count]


class TorchRolloutEngine(StepwiseSync):
    """See `tasks.engines.protocols.RolloutEngine`. Compute is BF16; quantised linears and cache as the recipe says."""

    name = "torch"

    def __init__(self, model_dir: Path, recipe: Recipe, settings: TorchRollout) -> None:
        torch.set_num_threads(settings.threads)
        self._settings = settings
        self._recipe = recipe
        self._model = empty_model(model_dir)
        plan = plan_linears(self._model, recipe.rollout_linears)
        use_fp8_inference(self._model, plan.quantized, block_spec(recipe.rollout_linears))
        self._attention = CachedAttention(recipe.kv.quantized, recipe.kv.quantize_query)
        self._layers = install_hook(self._model, self._attention)
        self._slots = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def sleep(self) -> None:
        """Nothing: the engine shares no device."""

    def _check(self, header: SyncHeader) -> None:
        layers = self._layers if self._recipe.kv.quantized else 0
        heads = scale_heads(self._model, self._recipe.calibration)
        check_header(header, forms_of(weights(self._model)), layers, heads)

    def _start(self) -> None:
        """Nothing: tensors are copied over the old ones."""

    def _install(self, tensors: Mapping[str, Tensor]) -> None:
        held = weights(self._model)
        for name, tensor in tensors.items():
            held[name].copy_(tensor)

    def _finish(self, header: SyncHeader) -> None:
        for module in self._model.modules():
            if isinstance(module, Fp8InferenceLinear):
                module.install()
        self._attention.scales = dict(header.kv_scales)

    def _forget(self) -> None:
        self._attention.start(0)
        self._attention.scales, self._slots = {}, 0

    def _recover(self) -> None:
        """Nothing: the next sync brings every tensor."""

    def generate(self, request: GenerateRequest) -> RolloutBatch:
        return drain(self.stream(request))

    def stream(self, request: GenerateRequest) -> GroupStream:
        """Groups end with their decode batch."""
        check_version(self._version, request.weight_version)
        check_request(request, *self._limits)
        chunks, groups, sample = self._chunks(request.prompts), OpenGroups(request.prompts), 0
        parts: list[_Decoded] = []
        for chunk in chunks:
            # The samples themselves are put together outside: autograd refuses tensors made in inference mode.
            with torch.inference_mode():
                parts.append(self._decode_chunk(chunk, request))
            ended = groups.add(enumerate(parts[-1].responses(), sample))
            sample += len(parts[-1].lengths)
            if ended:
                yield ended
                check_version(self._version, request.weight_version)
        prompts = [prompt for chunk in chunks for prompt in chunk for _ in prompt.seeds]
        return _assemble(prompts, parts, request.weight_version)

    def logprobs(self, weight_version: int, rows: TokenRows, prompt_lengths: Tensor) -> Tensor:
        check_version(self._version, weight_version)
        check_rows(rows, prompt_lengths, *self._limits)
        found = torch.full(rows.tokens.shape, float("nan"))
        for part in torch.arange(rows.tokens.shape[0]).split(self._settings.batch_size):
            with torch.inference_mode():
                forced = self._force_chunk(rows.tokens[part], rows.lengths[part], prompt_lengths[part])
            found[part] = forced
        return found

    @property
    def _limits(self) -> tuple[int, int]:
        """Positions and tokens of the model."""
        config = self._model.config
        return int(config.max_position_embeddings), int(config.vocab_size)

    def _chunks(self, prompts: tuple[Prompt, ...]) -> list[list[Prompt]]:
        """Whole prompts whose samples fit a decode batch together; a prompt with more samples is split."""
        limit, used = self._settings.batch_size, 0
        chunks: list[list[Prompt]] = []
        pieces = [
            Prompt(p.id, p.token_ids, p.seeds[i : i + limit]) for p in prompts for i in range(0, len(p.seeds), limit)
        ]
        for piece in pieces:
            if not chunks or used + len(piece.seeds) > limit:
                chunks.append([])
                used = 0
            chunks[-1].append(piece)
            used += len(piece.seeds)
        return chunks

    def _prefill(self, prompts: list[Prompt], slots: int) -> tuple[Tensor, Tensor]:
        """Run the prompts once each; returns next-token logits and cached lengths for each sample."""
        lengths = torch.tensor([len(p.token_ids) for p in prompts])
        tokens = torch.zeros(len(prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in enumerate(prompts):
            tokens[row, : len(prompt.token_ids)] = torch.tensor(prompt.token_ids)
        self._attention.start(slots)
        hidden = forward_hidden(self._model, tokens, torch.arange(tokens.shape[1]).unsqueeze(0))
        logits = head_logits(self._model, hidden[torch.arange(len(prompts)), lengths - 1])
        index = torch.arange(len(prompts)).repeat_interleave(torch.tensor([len(p.seeds) for p in prompts]))
        self._attention.expand(index, lengths[index])
        return logits[index], lengths[index]

    def _decode_chunk(self, prompts: list[Prompt], request: GenerateRequest) -> _Decoded:
        slots = max(len(p.token_ids) for p in prompts) + request.max_new_tokens
        logits, lengths = self._prefill(prompts, slots)
        self._slots = max(self._slots, logits.shape[0] * slots)
        uniform = uniforms([seed for p in prompts for seed in p.seeds], request.max_new_tokens)
        eos = torch.tensor(request.eos_token_ids)
        done = torch.zeros(logits.shape[0], dtype=torch.bool)
        tokens, logprobs, counts = [], [], torch.zeros_like(lengths)
        for step in range(request.max_new_tokens):
            if request.greedy:
                token, logprob = greedy_tokens(logits)
            else:
                token, logprob = sample_tokens(logits, request.temperature, uniform[:, step])
            tokens.append(torch.where(done, 0, token))
            logprobs.append(torch.where(done, float("nan"), logprob))
            counts += (~done).to(torch.int64)
            done |= torch.isin(token, eos)
            if bool(done.all()) or step + 1 == request.max_new_tokens:
                break
            logits = self._advance(tokens[-1])
        return _Decoded(torch.stack(tokens, 1), torch.stack(logprobs, 1), counts, ~done)

    def _force_chunk(self, tokens: Tensor, lengths: Tensor, prompt_lengths: Tensor) -> Tensor:
        """The decode loop with given tokens in place of drawn ones; shapes as in `RolloutEngine.logprobs`."""
        prompts = [
            Prompt(str(i), tuple(row[:n].tolist()), (0,))
            for i, (row, n) in enumerate(zip(tokens, prompt_lengths, strict=True))
        ]
        counts, rows = lengths - prompt_lengths, torch.arange(tokens.shape[0])
        steps = int(counts.max())
        logits, _ = self._prefill(prompts, int(prompt_lengths.max()) + steps)
        found = torch.full(tokens.shape, float("nan"))
        for step in range(steps):
            live = step < counts
            column = torch.where(live, prompt_lengths + step, 0)
            token = torch.where(live, tokens[rows, column], 0)
            found[rows[live], column[live]] = token_logprobs(logits[live], token[live], 1.0)
            if step + 1 < steps:
                # A row that ends stays at its last position: the next one may be beyond the model's.
                logits = self._advance(token, (step + 1 < counts).to(torch.int64))
        return found

    def _advance(self, token: Tensor, by: Tensor | int = 1) -> Tensor:
        """Feed one token a sample, each of which then holds `by` more; returns the logits of the next."""
        lengths = self._attention.lengths
        assert lengths is not None
        hidden = forward_hidden(self._model, token.unsqueeze(1), lengths.unsqueeze(1))
        self._attention.lengths = lengths + by
        return head_logits(self._model, hidden[:, 0])

    def report(self) -> EngineReport:
        held = weights(self._model)
        fp8 = {name: m for name, m in self._model.named_modules() if isinstance(m, Fp8InferenceLinear)}
        dtypes = {str(m.get_buffer("weight").dtype).removeprefix("torch.") for m in fp8.values()}
        size = sum(t.numel() * t.element_size() for t in held.values())
        return EngineReport(
            engine=self.name,
            version=self._version,
            quantized_linears=tuple(fp8),
            linear_dtype="/".join(sorted(dtypes)) or "bfloat16",
            kv_dtype=str(self._attention.dtype).removeprefix("torch."),
            query_dtype="float8_e4m3fn" if self._attention.quantize_query else "bfloat16",
            scales=dict(self._attention.scales),
            fingerprints=fingerprints(held),
            block_specs=tuple(dict.fromkeys(m.spec for m in fp8.values())),
            problems=tuple(
                f"{name}: the product does not use the weights that are held"
                for name, m in fp8.items()
                if self._version is not None and not m.is_consistent()
            ),
            memory={"memory/weights_gb": size / 1e9, "memory/kv_capacity_tokens": float(self._slots)},
        )


def _assemble(prompts: list[Prompt], parts: list[_Decoded], version: int) -> RolloutBatch:
    """Put prompt and response of every sample side by side, right-padded."""
    prompt_lengths = torch.tensor([len(p.token_ids) for p in prompts])
    response_lengths = torch.cat([part.lengths for part in parts])
    width = int((prompt_lengths + response_lengths).max())
    tokens = torch.zeros(len(prompts), width, dtype=torch.int64)
    logprobs = torch.full((len(prompts), width), float("nan"))
    rows = [(part, row) for part in parts for row in range(part.tokens.shape[0])]
    for sample, (prompt, (part, row)) in enumerate(zip(prompts, rows, strict=True)):
        start, count = len(prompt.token_ids), int(part.lengths[row])
        tokens[sample, :start] = torch.tensor(prompt.token_ids)
        tokens[sample, start : start + count] = part.tokens[row, :count]
        logprobs[sample, start : start + count] = part.logprobs[row, :count]
    truncated = torch.cat([part.truncated for part in parts])
    return RolloutBatch(
        tokens, prompt_lengths, response_lengths, logprobs, truncated, torch.full((len(prompts),), version)
    )
