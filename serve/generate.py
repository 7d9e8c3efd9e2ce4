"""One answer in the terminal, streamed: `python -m serve.generate "What is 2 + 3?"`."""

from __future__ import annotations

import argparse
import io
import logging
import signal
import sys
from pathlib import Path
from typing import Any

DIM, PLAIN = "\033[2m", "\033[0m"


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m serve.generate", description=__doc__)
    parser.add_argument("prompt", help="the user's message; - reads it from standard input")
    parser.add_argument(
        "--model", help="checkpoint folder, .gguf file or hub repository id (default: the embedded one)"
    )
    parser.add_argument("--tokenizer", help="folder or repository of the tokenizer, where it is not with the model")
    parser.add_argument("--dtype", choices=["auto", "bfloat16", "float32"], default="auto")
    parser.add_argument(
        "--kernels",
        choices=["auto", "pallas", "plain"],
        default="auto",
        help="fused decode kernels where they can run (auto, default), insist on them (pallas), or plain XLA",
    )
    parser.add_argument("--system", help="a system message")
    media = {"dest": "media", "action": "append", "default": [], "metavar": "FILE"}
    parser.add_argument("--image", type=image_part, **media, help="a picture before the prompt; may be repeated")
    parser.add_argument("--audio", type=audio_part, **media, help="a clip before the prompt; may be repeated")
    parser.add_argument("--effort", help="how much to think: none to max, or a number from 0 to 0.99 (Inkling)")
    parser.add_argument("--no-thinking", action="store_true", help="ask for an answer without a thinking block")
    parser.add_argument("--temperature", type=float, help="0 is greedy (default: the checkpoint's own)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--max-tokens", type=int, help="most tokens to generate, thinking included")
    parser.add_argument("--max-model-len", type=int, help="context length (default: the model's limit)")
    parser.add_argument(
        "--num-draft-tokens", type=int, help="tokens to draft a step; 0 for none (default: 4 if it can)"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """The command line; exit status 2 with one sentence where the input is unusable.

    Thinking goes to standard error, the answer and tool calls to standard output.
    """
    args = parse(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a terminal may lack characters, and models write lone surrogates
            stream.reconfigure(errors="backslashreplace")
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    from serve.assemble import assemble  # imports JAX, so not before the arguments are known to be good
    from serve.chat import default_sampling, encode_prompt, stream_chat

    prompt = sys.stdin.read() if args.prompt == "-" else args.prompt
    messages = [{"role": "system", "content": args.system}] if args.system else []
    text = {"type": "text", "text": prompt}
    messages.append({"role": "user", "content": [*args.media, text] if args.media else prompt})
    try:
        assembled = assemble(
            args.model,
            tokenizer=args.tokenizer,
            dtype=args.dtype,
            text_only=not args.media,
            kernels=args.kernels,
            max_model_len=args.max_model_len,
            num_draft_tokens=args.num_draft_tokens,
            num_slots=1,
        )
        sampling = default_sampling(
            assembled,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            seed=args.seed,
            max_tokens=args.max_tokens,
        )
        options = {"enable_thinking": not args.no_thinking, "reasoning_effort": args.effort}
        encode_prompt(assembled, messages, **options)  # what cannot be read is refused before anything is compiled
        with assembled.engine:
            thought = False
            for delta in stream_chat(assembled, messages, **options, sampling=sampling):
                if thought and not delta.reasoning:
                    print(file=sys.stderr, flush=True)  # between thinking and answer, wherever both are shown
                thought = bool(delta.reasoning)
                show(delta)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(flush=True)
    return 0


def image_part(file: str) -> dict[str, Any]:
    """A file as a part of a message, as `serve.media.content.load_media` takes it."""
    return {"type": "image", "image": existing(file)}


def audio_part(file: str) -> dict[str, Any]:
    """Likewise, a clip."""
    return {"type": "audio", "audio": existing(file)}


def existing(file: str) -> Path:
    """The path, if it is a file's."""
    if not Path(file).is_file():
        raise argparse.ArgumentTypeError(f"{file} is not a file")
    return Path(file)


def show(delta) -> None:
    """Prints one delta: thinking dimmed where standard error is a terminal."""
    if delta.reasoning:
        text = f"{DIM}{delta.reasoning}{PLAIN}" if sys.stderr.isatty() else delta.reasoning
        print(text, end="", file=sys.stderr, flush=True)
    if delta.content:
        print(delta.content, end="", flush=True)
    for call in delta.tool_calls:
        print(f"\n{call.name}({call.arguments})", end="", flush=True)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # extension modules swallow KeyboardInterrupt while they load
    sys.exit(main())
