"""A checkpoint's tokenizer: finding its file, and reading it with the loader of its form."""

from __future__ import annotations

from pathlib import Path

from serve.text.chat_template import check_template
from serve.text.inkling_tokens import END_TURN
from serve.text.tokenizer import Tokenizer
from serve.text.tokenizer_settings import UnusableFile


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Loads the tokenizer of a checkpoint.

    Args:
        path: a folder or a file, as `find_tokenizer` takes it. The settings beside `tokenizer.json` or a `*.model` (for
            a file in a folder `tiktoken`, those beside the folder) are read too, whichever exist:
            tokenizer_config.json, special_tokens_map.json, generation_config.json, chat_template.jinja.

    Raises:
        FileNotFoundError: there is no tokenizer at `path`.
        ValueError: a file is damaged, or uses a form that is not supported, or the files contradict each other; the
            message names the file.
    """
    file = find_tokenizer(path)
    try:
        tokenizer = _load(file)
        if tokenizer.chat_template is not None:
            check_template(tokenizer.chat_template)
    except UnusableFile:
        raise
    except BaseException as error:  # the libraries behind raise what they like; a panic in Rust is no Exception
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"{file} cannot be used as a tokenizer: {_reason(error)}") from error
    if END_TURN in tokenizer.special_token_ids:  # what ends an answer of Inkling, whatever the settings say (spec 8.6)
        tokenizer.eos_token_ids = tuple(
            dict.fromkeys([*tokenizer.eos_token_ids, tokenizer.special_token_ids[END_TURN]])
        )
    tokenizer.source = file
    return tokenizer


def _reason(error: BaseException) -> str:
    if isinstance(error, KeyError):
        return f"it lacks {error}"
    return str(error) if isinstance(error, ValueError) and str(error) else f"{type(error).__name__}: {error}"


def find_tokenizer(path: str | Path, gguf: Path | None = None) -> Path:
    """The file that holds the tokenizer.

    Args:
        path: one of these files, or a folder with `tokenizer.json`, a SentencePiece or tiktoken `*.model`,
            `tiktoken/*.model` or a `*.gguf` file, looked for in this order.
        gguf: the GGUF file to take if the folder has neither of the others; None for its first.

    Raises:
        FileNotFoundError: there is none, or nothing at `path`.
        ValueError: `path` is a file of another kind.
    """
    path = Path(path)
    if path.is_file():
        if path.suffix in (".json", ".model", ".gguf"):
            return path
        raise ValueError(f"{path} is no tokenizer: expected tokenizer.json, a .model or a .gguf file")
    if not path.is_dir():
        raise FileNotFoundError(f"{path} does not exist")
    for pattern in ("tokenizer.json", "tokenizer.model", "*.model", "tiktoken/*.model"):
        if found := sorted(path.glob(pattern)):
            return found[0]
    if found := [gguf] if gguf is not None else sorted(path.glob("*.gguf")):
        return found[0]
    raise FileNotFoundError(f"no tokenizer in {path}: put tokenizer.json, a *.model or a *.gguf file there")


def _load(file: Path) -> Tokenizer:
    # The libraries behind each form are imported where they are needed.
    if file.suffix == ".json":
        from serve.text import huggingface

        return huggingface.load(file)
    if file.suffix == ".model":
        from serve.text import tiktoken_bpe

        if tiktoken_bpe.is_tiktoken(file):
            return tiktoken_bpe.load(file)
        from serve.text import spm

        return spm.load(file)
    from serve.text import gguf_metadata

    return gguf_metadata.load(file)
