"""Tests by kind: unit, contract, flows, gpu."""
