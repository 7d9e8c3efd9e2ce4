"""The tokenizer as GetTokenizer sends it: a zip of its files, in chunks."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from smg_grpc_proto.generated import common_pb2

CHUNK_BYTES = 64 * 1024

_NAMES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.json",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_PATTERNS = ("*.jinja", "*.model", "*.tiktoken")


def tokenizer_files(folders: Iterable[Path]) -> dict[str, Path]:
    """The tokenizer's and the configs' files by name; of two with one name, that of the earlier folder."""
    found: dict[str, Path] = {}
    for folder in folders:
        candidates = [folder / name for name in _NAMES]
        candidates += [path for pattern in _PATTERNS for path in sorted(folder.glob(pattern))]
        for path in candidates:
            if path.is_file():
                found.setdefault(path.name, path)
    return found


def tokenizer_zip(folders: Iterable[Path], source: Path | None = None) -> bytes:
    """One flat zip; the same files give the same bytes, so that a gateway recognises a tokenizer by the sum.

    Args:
        folders: where the files are, the first to have one wins.
        source: the file the tokenizer was read from. Out of a GGUF file come the files that its metadata stands for,
            and go before the folders'.

    Raises:
        FileNotFoundError: no tokenizer in these folders.
    """
    folders = list(folders)
    files = {name: path.read_bytes() for name, path in tokenizer_files(folders).items()}
    if source is not None and source.suffix == ".gguf":
        from serve.text import gguf_metadata

        files |= gguf_metadata.tokenizer_files(gguf_metadata.read_metadata(source))
    if not any(name.startswith(("tokenizer.", "vocab.")) or name.endswith(".tiktoken") for name in files):
        raise FileNotFoundError(f"No tokenizer files in {' or '.join(map(str, folders))}.")
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name), content, zipfile.ZIP_DEFLATED)  # a fixed date
    return buffer.getvalue()


def chunks(data: bytes) -> Iterator[common_pb2.GetTokenizerChunk]:
    """`data` in pieces of at most 64 KiB; the last carries the SHA-256 of the whole."""
    digest = hashlib.sha256(data).hexdigest()
    for start in range(0, len(data), CHUNK_BYTES):
        last = start + CHUNK_BYTES >= len(data)
        yield common_pb2.GetTokenizerChunk(data=data[start : start + CHUNK_BYTES], sha256=digest if last else "")
