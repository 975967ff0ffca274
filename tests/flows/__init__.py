"""Whole runs: real processes, real servers, real kills."""
