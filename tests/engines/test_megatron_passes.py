"""What Transformer Engine's attention is told of a packed pass. In a process of its own, which loads Megatron."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

if find_spec("megatron") is None:
    pytest.skip("Megatron Core is not installed (extra engines-cpu)", allow_module_level=True)

PROGRAM = """
import json
import torch
from tasks.engines.megatron_passes import _sequences
from tasks.numerics.packing import PackingRule, pack

lengths, found = torch.tensor([9, 3, 7]), []
for index, slot in (([2, 0, 1], 1), ([2, 0, 1], 4), ([], 4)):
    chosen = torch.tensor(index, dtype=torch.int64)
    rows = pack(torch.ones(3, 9, dtype=torch.int64), lengths, chosen, PackingRule(64, 16, slot))
    told = _sequences(rows, torch.device("cpu"))
    bounds = (told.cu_seqlens_q, told.cu_seqlens_kv, told.cu_seqlens_q_padded, told.cu_seqlens_kv_padded)
    one = all(each is bounds[0] for each in bounds)
    found.append([rows.tokens.numel(), bounds[0].tolist(), told.max_seqlen_q, told.max_seqlen_kv, one])
print(json.dumps(found))
"""


def test_every_token_is_in_a_sequence_and_nothing_lies_between_them() -> None:
    run = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False, timeout=120)
    assert run.returncode == 0, run.stderr
    # Rows of 7, 9 and 3 tokens; with slots of fours; and a pass without rows.
    assert json.loads(run.stdout.splitlines()[-1]) == [
        [32, [0, 7, 16, 32], 16, 16, True],
        [32, [0, 8, 20, 32], 12, 12, True],
        [16, [0, 16], 16, 16, True],
    ]
