"""The process that makes questions: `python -m tasks.data.generator_worker`.

Several generators walk over sets of strings, so their questions depend on the interpreter's hash seed. A
process of its own has that seed fixed, which makes the same questions in every run, and keeps the library out
of the driver. One request {"task", "parameters", "seed", "count"}; then one line per question, or {"error"}.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from tasks.data.wire import Wire, claim_pipes, decode, encode


def serve(wire: Wire) -> None:
    """Make the questions of one request and write them as they come."""
    request = wire.receive()
    if request is None:
        return
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    task, count = request["task"], request["count"]
    if task not in DATASETS:
        wire.send({"error": "unknown task", "known": sorted(DATASETS)})
        return
    try:
        dataset = reasoning_gym.create_dataset(task, **decode(request["parameters"]), seed=request["seed"], size=count)
    except Exception as error:
        names = sorted(f.name for f in dataclasses.fields(DATASETS[task][1]))
        wire.send({"error": f"{type(error).__name__}: {error}", "parameters": names})
        return
    for index in range(count):
        wire.send(_question(dataset, index))


def _question(dataset: Any, index: int) -> dict[str, Any]:
    try:
        entry = dataset[index]
        return {key: encode(entry[key], key) for key in ("question", "answer", "metadata")}
    except Exception as error:
        return {"error": f"question {index}: {type(error).__name__}: {error}"}


if __name__ == "__main__":
    serve(claim_pipes())
