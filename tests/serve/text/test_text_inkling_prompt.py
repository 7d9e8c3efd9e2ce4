"""Inkling's chat format, token for token as its makers' renderer writes it, by template and without."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve.request import InvalidRequest
from serve.text import encode_chat, load_tokenizer, render_chat
from serve.text.chat_template import BUILT_IN
from serve.text.inkling_prompt import EFFORTS, effort_text
from serve.text.inkling_tokens import PLACEHOLDERS, control_names

GOLDEN = json.loads((Path(__file__).parent / "inkling_golden.json").read_text("utf-8"))
TEMPLATE = (Path(__file__).parents[3] / "checkpoints/training/inkling/chat_template.jinja").read_text("utf-8")
BOTH = pytest.mark.parametrize("template", [BUILT_IN, TEMPLATE], ids=["built-in", "template"])
USER = {"role": "user", "content": "Hi"}
EFFORT = [200002, 200004, 133850, 6942, 3211, 25, 220, 15, 13, 24, 200010]
MODEL = 200001
EFFORT_TEXT = "<|message_system|><|content_text|>Thinking effort level: 0.9<|end_message|>"
USER_TEXT = "<|message_user|><|content_text|>Hi<|end_message|>"


@BOTH
@pytest.mark.parametrize("case", GOLDEN, ids=range(len(GOLDEN)))
def test_prompts_are_those_of_the_makers_renderer(inkling, template, case):
    options = {"template": template, "reasoning_effort": case["effort"], "add_generation_prompt": False}
    assert encode_chat(inkling, case["messages"], case.get("tools"), **options) == case["ids"]
