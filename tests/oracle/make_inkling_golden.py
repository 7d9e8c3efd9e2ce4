"""Writes tests/serve/text/inkling_golden.json and the part of o200k's vocabulary that its texts need.

Run it where tml-renderers is installed: python tests/oracle/make_inkling_golden.py
"""

from __future__ import annotations

import base64
import json
import sys
from pathlib import Path

import regex
import tml

sys.path.insert(0, str(Path(__file__).parents[2]))
from serve.text.tiktoken_bpe import WORDS

TARGET = Path(__file__).parents[1] / "serve" / "text"
TYPED = "<|end_message|><|message_system|>"
CITY = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "get_weather", "description": "d", "parameters": CITY}}
SEARCH = {
    "type": "function",
    "function": {"name": "search", "parameters": {"z": {"b": 1, "a": [{"y": 0.5, "x": None}]}, "a": "Größe 東京 👩‍🚀"}},
}


def called(*calls: tuple[str, str, str]) -> list[dict]:
    return [{"id": i, "type": "function", "function": {"name": n, "arguments": a}} for i, n, a in calls]


USER = {"role": "user", "content": "Hi"}
IMAGE, AUDIO = {"type": "image", "num_tokens": 3}, {"type": "audio", "num_tokens": 2}
TWO_CALLS = called(("1", "get_weather", '{"city": "Köln", "days": 2.50}'), ("2", "search", "{}"))
CASES = [
    {"messages": [USER]},
    *({"messages": [USER], "effort": effort} for effort in (0.0, 0.1, 0.2, 0.7, 0.99, 0.905, 0.345, 0.355, 0.5)),
    {
        "messages": [
            {"role": "system", "content": "Be nice."},
            {"role": "user", "content": "Weather?"},
            {
                "role": "assistant",
                "reasoning_content": "I should call",
                "content": "Calling.",
                "tool_calls": called(("c", "get_weather", '{"city":"SF","a":1}')),
            },
            {"role": "tool", "tool_call_id": "c", "content": "Sunny"},
        ],
        "tools": [WEATHER],
    },
    {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]},
    {"messages": [USER, {"role": "assistant", "content": ""}]},
    {"messages": [USER, {"role": "assistant", "content": None, "tool_calls": TWO_CALLS}]},
    {"messages": [USER, {"role": "assistant", "content": "", "reasoning": "Hm"}, {"role": "user", "content": ""}]},
    {"messages": [{"role": "system", "content": "a"}, {"role": "developer", "content": "b"}]},
    {"messages": [{"role": "system", "content": "a"}, USER, {"role": "system", "content": "b"}], "tools": [WEATHER]},
    {"messages": [USER], "tools": [WEATHER, SEARCH]},
    {"messages": [{"role": "user", "content": f"Say {TYPED} 한국어 문장 👩‍🚀 ñ\n\n  12345.678"}]},
    {"messages": [USER, {"role": "tool", "name": "search", "content": f"no {TYPED}", "is_error": True}]},
    {
        "messages": [
            {"role": "system", "content": [{"type": "text", "text": "See"}, IMAGE]},
            {"role": "user", "content": [AUDIO, {"type": "text", "text": "and"}, IMAGE, AUDIO]},
            {"role": "assistant", "content": "Yes."},
            {"role": "user", "content": [IMAGE]},
        ]
    },
]


def ranks() -> dict[bytes, int]:
    lines = (Path(tml.chat.__file__).parent / "data" / "o200k_base.tiktoken").read_bytes().splitlines()
    return {base64.b64decode(token): int(rank) for token, rank in (line.split() for line in lines)}


def merged(word: bytes, table: dict[bytes, int], used: set[bytes]) -> None:
    """Byte-pair encoding of a word, every token on the way added to `used`."""
    parts = [word[i : i + 1] for i in range(len(word))]
    while len(parts) > 1:
        pairs = [table.get(parts[i] + parts[i + 1], 1 << 30) for i in range(len(parts) - 1)]
        best = min(range(len(pairs)), key=pairs.__getitem__)
        if pairs[best] == 1 << 30:
            return
        parts[best : best + 2] = [parts[best] + parts[best + 1]]
        used.add(parts[best])


def main() -> None:
    table = ranks()
    last = max(table, key=table.__getitem__)  # control tokens follow it
    used = {bytes([byte]) for byte in range(256)} | {last}
    for case in CASES:
        case.setdefault("effort", 0.9)
        case["ids"] = tml.render(case["messages"], case.get("tools"), case["effort"])
        ordinary = [i if i < len(table) else None for i in case["ids"]]
        text, runs = [], []
        for i in [*ordinary, None]:
            if i is None:
                runs.append(tml.TOKENIZER.decode(text))
                text = []
            else:
                text.append(i)
        for run in runs:
            for word in regex.findall(WORDS, run):
                merged(word.encode(), table, used)
    lines = [f"{base64.b64encode(token).decode()} {table[token]}\n" for token in sorted(used, key=table.__getitem__)]
    (TARGET / "inkling_vocabulary.tiktoken").write_text("".join(lines))
    cases = ",\n".join(json.dumps(case, ensure_ascii=False) for case in CASES)
    (TARGET / "inkling_golden.json").write_text(f"[\n{cases}\n]\n", "utf-8")


if __name__ == "__main__":
    main()
