"""Starting: a second start finds its programs compiled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

START = """
import json, sys, time
import jax.monitoring
from serve.assemble import use_compilation_cache
use_compilation_cache(sys.argv[1])
misses = []
jax.monitoring.register_event_listener(
    lambda event, **_: misses.append(event) if event == "/jax/compilation_cache/cache_misses" else None)
import modeling
from serve.engine import Engine, EngineConfig
from serve.request import Request, SamplingParams
model = modeling.load("tests/fixtures/flint-bf16", progress=False)
started = time.monotonic()
with Engine(model, EngineConfig(num_slots=2, prefill_chunks=(16,), max_model_len=256, progress=False)) as engine:
    ready = time.monotonic() - started
    done = next(iter(engine.generate([Request("a", (1, 2, 3), SamplingParams(temperature=0.0, max_tokens=5))])))
print(json.dumps(dict(misses=len(misses), ready_s=ready, tokens=done.token_ids)))
"""


def start(cache: Path) -> dict:
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_COMPILATION", "JAX_PERSISTENT"))}
    done = subprocess.run(
        [sys.executable, "-c", START, str(cache)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_jx12_the_second_start_compiles_nothing_and_is_ready_sooner(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    assert first["misses"] > 4
    assert second["misses"] == 0
    assert second["ready_s"] < 0.7 * first["ready_s"]
    assert first["tokens"] == second["tokens"]
