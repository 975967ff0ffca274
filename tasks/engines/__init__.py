"""Rollout and trainer engines behind two protocols (`tasks.engines.protocols`)."""
