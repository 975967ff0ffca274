"""What a run stands on: checkpoint store, journal, MLflow writer. Nothing here knows about models."""
