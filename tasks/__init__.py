"""One module per step of the training algorithm, with engines, numerics and data below it."""
