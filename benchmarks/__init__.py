"""Measurements: `python -m benchmarks.<what>` prints one JSON line and a table. Needs jax, flax, numpy, ml_dtypes."""
