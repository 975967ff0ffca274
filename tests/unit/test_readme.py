"""What the README's commands name exists, and asks for what it says."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from conf.compose import compose
from flows.placement import placement

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", " ")


def test_targets_of_make_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = re.findall(r"`make ([a-z-]+)", README)
    named += [name for line in re.findall(r"^make ([a-z -]+[a-z])", README, re.MULTILINE) for name in line.split()]
    assert {"train", "test", "setup", "setup-engines"} <= set(named) <= targets


def test_gpus_are_counted_right_for_a_machine_that_has_them() -> None:
    commands = re.findall(r"^fp8-grpo train (.*trainer=megatron.*)# (\d+) GPUs$", README, re.MULTILINE)
    assert commands
    for command, gpus in commands:
        config = compose(shlex.split(command))
        assert config.model.path is not None
        assert placement(config, int(gpus)).gpus == int(gpus)
        assert placement(config, int(gpus)).rollout_gpus == placement(config, int(gpus)).trainer_gpus == 1
