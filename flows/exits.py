"""Exit codes of `fp8-grpo`, and how a failure is told."""

from __future__ import annotations

import sys
from typing import Final

from tasks.data.examples import DataError

OK: Final = 0
FAILED: Final = 1
CONFIG_ERROR: Final = 2
UNFINISHED: Final = 3
"""Stopped because an allocation was used up; the same command goes on (`resume=auto`, `--sweep-id`)."""
UNFINISHED_STATE: Final = "Unfinished"
"""Name of such a flow run's state in Prefect, whose type is Completed; nothing else may take it for done."""
ENGINE_FAILED: Final = 4
LATE: Final = 5
"""An engine was later than its deadline."""
BREAKER: Final = 6
"""A rule of `breakers` with the action stop has tripped."""
NOTHING_TRAINED: Final = 7
"""The run is at its end, and none of its updates was made."""
EQUAL_REWARDS: Final = 8
"""As `BREAKER`, by the rule on groups whose rewards are all equal."""
INTERRUPTED: Final = 130


def failed(error: Exception, code: int = FAILED) -> int:
    """Say the error in a line; the exit code that it stands for: refused data, else `code`."""
    print(f"fp8-grpo: {type(error).__name__}: {error}", file=sys.stderr)
    return CONFIG_ERROR if isinstance(error, DataError) else code
