"""Pure tensor maths: no Ray, no Prefect, no configuration objects."""
