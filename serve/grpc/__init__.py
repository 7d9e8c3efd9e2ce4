"""The gRPC server. `python -m serve.grpc` starts it; `vllm.py` says what it answers."""
