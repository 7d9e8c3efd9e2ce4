"""The server's options: a YAML file, then the command line over it."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import ipaddress
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pydantic
import tyro
import yaml


@dataclasses.dataclass(frozen=True)
class ServeConfig:
    """Serves a model over gRPC, for the smg gateway and its like. Stops at SIGTERM, after the running requests."""

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True)

    config: str | None = None
    """YAML file with any of these options; the command line goes over it."""
    model: str | None = None
    """Checkpoint: a folder, a file, or a Hugging Face repository. The embedded small model if left out."""
    tokenizer: str | None = None
    """Folder or repository of the tokenizer, when it is not with the model."""
    served_model_name: str | None = None
    """Name that clients see; the model's own if left out."""
    host: str = "127.0.0.1"
    """Address to listen on. Opened to others it should have TLS and tokens, or a gateway in front."""
    port: int = 50051
    """TCP port; 0 takes a free one and the ready line names it."""
    metrics_port: int | None = None
    """HTTP port of Prometheus metrics at /metrics, without TLS or tokens; 0 takes a free one, which the log names. None
    are offered if left out."""
    tls_certificate: str | None = None
    """PEM file of the server's certificate and those between it and its authority; with tls_key, the port speaks TLS
    only."""
    tls_key: str | None = None
    """PEM file of that certificate's private key, not encrypted."""
    tls_client_ca: str | None = None
    """PEM file of authorities; if given, every client must show a certificate of one of them (mutual TLS)."""
    auth_token_file: str | None = None
    """File of tokens, one a line, each of 16 or more characters; # begins a comment line. If given, calls must carry
    one of them as metadata, 'authorization: Bearer <token>'; the standard health service needs none. Read again when it
    changes."""
    insecure_auth: bool = False
    """Take tokens without TLS on an address that other machines reach. They can then be read on the way."""
    services: tuple[Literal["vllm", "tokenspeed"], ...] | None = None
    """Protocols to speak: vllm.grpc.engine.VllmEngine, tokenspeed.grpc.scheduler.TokenSpeedScheduler. If left out, vllm
    for a model of text and tokenspeed for one that reads pictures or sound: smg sends sound over tokenspeed only, and
    takes vllm where it finds both."""
    dtype: Literal["auto", "bfloat16", "float32"] = "auto"
    """Compute type; auto is the checkpoint's."""
    text_only: bool = False
    """Leave out the towers for pictures and sound."""
    kernels: Literal["auto", "pallas", "plain"] = "auto"
    """How decode steps run: pallas, the fused kernels (Flint in bfloat16 on an NVIDIA GPU of compute capability 9.0 or
    more, at most 8 slots); plain, as XLA compiles them; auto takes the kernels where they can run and logs which."""
    num_draft_tokens: int | None = None
    """Tokens to draft and check a step, at most the model's drafting depths; 0 for none. If left out, 4 or as many as
    the model can."""
    max_model_len: int | None = None
    """Most tokens of prompt and output together; the model's own limit if left out."""
    num_slots: int = 8
    """Sequences that run at once."""
    max_queue: int = 1024
    """Sequences that may wait for a slot; beyond it requests get RESOURCE_EXHAUSTED."""
    memory_fraction: float | None = None
    """Part of the device memory to take, above 0 up to 1 (XLA_PYTHON_CLIENT_MEM_FRACTION); JAX's choice if left out."""
    max_message_mb: int = 256
    """Largest message in either direction, in MiB; beyond it calls get RESOURCE_EXHAUSTED. A picture's
    pixels take 12 bytes each on their way from smg, over vllm 24."""
    drain_seconds: float = 30.0
    """Time the running requests have to finish after SIGTERM."""
    compilation_cache: str | None = None
    """Folder that keeps compiled programs between starts."""


def parse(argv: Sequence[str]) -> ServeConfig:
    """Reads the command line and the YAML file it names.

    Raises:
        ValueError: an unusable file or value; the message is for the user.
        SystemExit: after --help (0), or for arguments that do not parse (2).
    """
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    path = finder.parse_known_args(argv)[0].config
    default = ServeConfig() if path is None else read_yaml(Path(path))
    config = tyro.cli(ServeConfig, args=list(argv), default=default, prog="python -m serve.grpc")
    check(config)
    return config


def read_yaml(path: Path) -> ServeConfig:
    """A configuration from a file of `option: value` lines; types are taken strictly.

    Raises:
        ValueError: the file is missing or malformed, or has an unknown key or a value of the wrong type.
    """
    try:
        content = yaml.safe_load(path.read_text()) or {}
    except OSError as error:
        raise ValueError(f"The configuration file {path} cannot be read: {error.strerror}.") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold 'option: value' lines, not a {type(content).__name__}.")
    names = [field.name for field in dataclasses.fields(ServeConfig) if field.name != "config"]
    faults = [_unknown_key(key, names) for key in content if key not in names]
    if not faults:
        try:
            # As JSON: strict validation takes a mapping for a dataclass from there only.
            return pydantic.TypeAdapter(ServeConfig).validate_json(json.dumps(content, default=str))
        except pydantic.ValidationError as error:
            faults = [f"{fault['loc'][0]}: {fault['msg']}, got {fault['input']!r}" for fault in error.errors()]
    raise ValueError(f"{path}: {'; '.join(faults)}.")


def _unknown_key(key: Any, names: Sequence[str]) -> str:
    near = difflib.get_close_matches(str(key), names, n=1)
    return f"unknown option {key!r}" + (f" (did you mean {near[0]!r}?)" if near else f" (known: {', '.join(names)})")


def check(config: ServeConfig) -> None:
    """Refuses values that cannot work.

    Raises:
        ValueError: naming the first option that is out of its range.
    """
    ranges = {
        "port": (0, 65535),
        "metrics_port": (0, 65535),
        "max_model_len": (2, 2**31 - 1),
        "num_draft_tokens": (0, 64),
        "num_slots": (1, 1024),
        "max_queue": (0, 1_000_000),
        "max_message_mb": (1, 2047),  # gRPC holds the limit in an int32 of bytes
        "drain_seconds": (0, 86400),
    }
    for name, (low, high) in ranges.items():
        value = getattr(config, name)
        if value is not None and not low <= value <= high:
            raise ValueError(f"{name} is {value}; it must be {low} to {high}.")
    if config.services is not None and not 0 < len(config.services) == len(set(config.services)):
        raise ValueError("services must name each protocol once: vllm, tokenspeed, or both.")
    fraction = config.memory_fraction
    if fraction is not None and not 0 < fraction <= 1:
        raise ValueError(f"memory_fraction is {fraction}; it must be above 0 and at most 1.")
    _check_security(config)


def _check_security(config: ServeConfig) -> None:
    """That the options fit each other; what their files hold is checked where they are read."""
    encrypted = config.tls_certificate is not None
    if encrypted != (config.tls_key is not None):
        given, missing = ("tls_certificate", "tls_key") if encrypted else ("tls_key", "tls_certificate")
        raise ValueError(f"{given} is given without {missing}; give both for TLS, or neither.")
    if config.tls_client_ca is not None and not encrypted:
        raise ValueError("tls_client_ca is given without tls_certificate and tls_key; client certificates need TLS.")
    if config.auth_token_file is not None and not (encrypted or config.insecure_auth or _is_loopback(config.host)):
        message = f"auth_token_file is given without TLS, and host is {config.host}: tokens could be read on the way."
        raise ValueError(message + " Give tls_certificate and tls_key, or set insecure_auth to true.")


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # a name; only this one is known to stay on the machine
        return host == "localhost"
