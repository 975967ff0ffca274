"""Ranks of a job, each in a process of its own, as Megatron wants them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def run_ranks(module: str, job: Mapping[str, Any], folder: Path, ranks: int) -> None:
    """`python -m MODULE JOB RANK` for every rank; fails with what a failed rank wrote. Files lie in `folder`.

    The job gets a `rendezvous` of its ranks, None for a single one, and `out`, the folder.
    """
    path = folder / "job.json"
    rendezvous = f"file://{folder / 'rendezvous'}" if ranks > 1 else None
    path.write_text(json.dumps({**job, "rendezvous": rendezvous, "out": str(folder)}))
    command = [sys.executable, "-m", module, str(path)]
    logs = [(folder / f"{rank}.log").open("w+") for rank in range(ranks)]
    started = [
        subprocess.Popen([*command, str(rank)], stdout=log, stderr=log, cwd=Path(__file__).parents[2])
        for rank, log in enumerate(logs)
    ]
    try:
        codes = [process.wait(240) for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
        for log in logs:
            log.close()
    written = [(folder / f"{rank}.log").read_text() for rank in range(ranks)]
    assert codes == [0] * ranks, "\n".join(text[-3000:] for code, text in zip(codes, written, strict=True) if code)
