#!/usr/bin/env bash
# Makes .venv from a locked requirements file: scripts/setup.sh requirements/test.txt
# Does nothing when .venv already holds exactly that file (its digest is kept inside).
set -euo pipefail
cd "$(dirname "$0")/.."
lock=$1
digest=$(cat "$lock" requirements/compile.txt pyproject.toml | sha256sum | cut -d' ' -f1)
[ "$(cat .venv/.lock 2>/dev/null)" = "$digest" ] && exit 0
if ! [ -x .venv/bin/python ]; then
  python=$(scripts/find_python.sh)
  echo "making .venv with $python" >&2
  "$python" -m venv .venv
fi
echo "installing $lock (hash-checked) into .venv" >&2
pip=(.venv/bin/python -m pip install --quiet --disable-pip-version-check --require-hashes)
"${pip[@]}" -r requirements/build.txt 2> .venv/pip.log || { cat .venv/pip.log >&2; exit 1; }
uv=(.venv/bin/uv pip install --quiet --python .venv/bin/python)
"${uv[@]}" --require-hashes -r "$lock"
"${uv[@]}" --no-deps --no-build-isolation --editable .
# Tests compile for GPUs that are not there, with a plugin that JAX must not find by itself: it gets its own folder.
if [ "$lock" = requirements/test.txt ]; then
  .venv/bin/uv pip sync --quiet --python .venv/bin/python --target .venv/deviceless --require-hashes requirements/compile.txt
fi
echo "$digest" > .venv/.lock
