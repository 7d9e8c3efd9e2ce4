#!/usr/bin/env bash
# Prints the path of a Python of at least 3.12, or says what to install and exits 2.
# Looks at $PYTHON, the PATH, pyenv's versions (its shims fail unless one is selected) and uv's.
set -u
if [ -n "${PYTHON:-}" ]; then
  found=$(command -v "$PYTHON" 2>/dev/null) && "$found" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' 2>/dev/null &&
    exec "$found" -c 'import sys; print(sys.executable)'
  echo "PYTHON=$PYTHON is not a Python of at least 3.12 with venv; name another or leave it out" >&2
  exit 2
fi
candidates=(python3.13 python3.12 python3.14 python3)
candidates+=("${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.1[2-9]*/bin/python)
command -v uv >/dev/null 2>&1 && candidates+=("$(uv python find --offline '>=3.12' 2>/dev/null)")
for python in "${candidates[@]}"; do
  [ -n "$python" ] || continue
  found=$(command -v "$python" 2>/dev/null) || continue
  if "$found" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' >/dev/null 2>&1; then
    "$found" -c 'import sys; print(sys.executable)'
    exit 0
  fi
done
# The last resort: let uv download one, where the network allows it.
if command -v uv >/dev/null 2>&1 && uv python install -q 3.12 >/dev/null 2>&1; then
  uv python find '>=3.12'
  exit 0
fi
echo "firesteel needs Python 3.12 or newer with venv; install one (apt, pyenv or uv) or name it: make PYTHON=/path/to/python3.12" >&2
exit 2
