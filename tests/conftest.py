"""What every test shares: a compilation cache, and tiny models of the real structure."""

from __future__ import annotations

import os
from pathlib import Path

# Before JAX is imported. Workers of one run share compiled programs; so does the next run on this machine.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".pytest_cache" / "xla"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Compiling is most of a small test's time; less optimisation of the machine code changes no arithmetic.
os.environ.setdefault("XLA_FLAGS", "--xla_backend_optimization_level=0")
