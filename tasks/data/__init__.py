"""Prompts with reference answers, their train/eval split, and the verifiers that score completions."""
