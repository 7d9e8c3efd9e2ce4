# Everything a fresh machine needs is set up by the targets themselves. `make PYTHON=/path/to/python3.12 ...` names one.
.PHONY: setup demo test lint

setup:
	@PYTHON=$(PYTHON) scripts/setup.sh requirements/test.txt

# A chat answer and a tool call through a real gRPC server and client, on the embedded checkpoint.
demo: setup
	@.venv/bin/python scripts/demo.py

lint: setup
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/basedpyright

test: lint
	.venv/bin/python -m pytest -n 2 --dist loadfile
