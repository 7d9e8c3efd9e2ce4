"""Writes chat_golden.json: what transformers' apply_chat_template makes of the conversations below.

    python make_chat_golden.py BPE_FOLDER        (needs transformers; made with 5.23.0)

BPE_FOLDER is any folder with a tokenizer.json; only templates are tried, no token ids.
"""

import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
CALL = {"type": "function", "id": "c1", "function": {"name": "f", "arguments": {"a": "é <b>", "n": [1, None, 2.5]}}}
TOOL = {"type": "function", "function": {"name": "f", "description": "é & <x>", "parameters": {"type": "object"}}}
TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHello. "},
    {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "now?"}]},
    {"role": "assistant", "content": "", "reasoning_content": " plan ", "tool_calls": [CALL, CALL]},
    {"role": "tool", "content": "one", "tool_call_id": "c1"},
    {"role": "tool", "content": "two", "tool_call_id": "c2"},
]
# Whitespace control, loop controls, JSON with layout, a generation block.
OTHER = """{%- for m in messages %}
    {% if m.role == 'tool' %}
        {% break %}
    {% endif %}
<{{ m.role }}>
    {% generation %}{{ m.content }}{% endgeneration %}

{% endfor %}
{{ tools | tojson(indent=2) }}{{ {"b": "é<&'", "a": 1} | tojson(sort_keys=True, separators=(",", ":")) }}
{% if effort is defined %}effort: {{ effort }}
{% endif %}
end: {{ eos_token }}
"""
GLM = "glm47.jinja"  # a file beside this one
CASES = [
    {"template": GLM, "messages": TURNS[:2]},
    {"template": GLM, "messages": TURNS, "tools": [TOOL]},
    {"template": GLM, "messages": TURNS, "template_kwargs": {"enable_thinking": False}},
    {"template": GLM, "messages": TURNS[:4], "template_kwargs": {"clear_thinking": False}},
    {"template": GLM, "messages": TURNS[:3], "add_generation_prompt": False},
    {"template": OTHER, "messages": TURNS[:3] + TURNS[5:], "tools": [TOOL]},
    {"template": OTHER, "messages": TURNS[:2], "template_kwargs": {"effort": "low"}},
]


def main() -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{sys.argv[1]}/tokenizer.json", eos_token="<|endoftext|>")
    for case in CASES:
        case["expected"] = tokenizer.apply_chat_template(
            case["messages"],
            tools=case.get("tools"),
            chat_template=(HERE / GLM).read_text("utf-8") if case["template"] == GLM else case["template"],
            add_generation_prompt=case.get("add_generation_prompt", True),
            tokenize=False,
            **case.get("template_kwargs", {}),
        )
    (HERE / "chat_golden.json").write_text(json.dumps(CASES, ensure_ascii=False, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
