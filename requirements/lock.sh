#!/usr/bin/env bash
# Rewrites the locked requirements after a change of pyproject.toml: requirements/lock.sh
set -euo pipefail
cd "$(dirname "$0")/.."
compile() { uv pip compile --quiet --universal --python-version 3.12 --generate-hashes --no-annotate --no-header --no-emit-index-url "$@"; }
compile requirements/build.in -o requirements/build.txt
compile pyproject.toml -o requirements/base.txt
compile pyproject.toml --extra cuda --extra media -o requirements/cuda.txt
compile pyproject.toml --extra test -o requirements/test.txt
compile requirements/compile.in --no-deps -o requirements/compile.txt
