"""Configuration: Hydra groups (YAML), the pydantic schema that they must satisfy, and their composition."""
