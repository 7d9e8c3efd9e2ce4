"""Names of Inkling's control tokens (spec 8.1, 8.2). Ids are the tokenizer's own: a small tokenizer has others.

    message := ROLE [author's name] KIND payload <|end_message|>

An assistant's turn is one message a part, and ends with `<|content_model_end_sampling|>`.
"""

from __future__ import annotations

from collections.abc import Container

USER, MODEL = "<|message_user|>", "<|message_model|>"
SYSTEM, TOOL = "<|message_system|>", "<|message_tool|>"
ROLES = (USER, MODEL, SYSTEM, TOOL)

TEXT, THINKING = "<|content_text|>", "<|content_thinking|>"
CALL, CALL_TEXT = "<|content_invoke_tool_json|>", "<|content_invoke_tool_text|>"
TOOL_ERROR = "<|content_tool_error|>"
IMAGE, AUDIO = "<|content_image|>", "<|content_audio_input|>"
XML = "<|content_xml|>"
XML_UNNAMED = "<|unused_200024|>"  # as some vocabularies spell it
KINDS = (TEXT, THINKING, CALL, CALL_TEXT, TOOL_ERROR, IMAGE, AUDIO, XML, XML_UNNAMED)

END_MESSAGE = "<|end_message|>"
AUDIO_END = "<|audio_end|>"
END_TURN = "<|content_model_end_sampling|>"

# Stand for one row of a tower each, where the model's config names no others.
PLACEHOLDERS = {"image": "<|unused_200054|>", "audio": "<|unused_200053|>"}

# The control tokens of a tiktoken file, by position behind its ordinary tokens; the others are unused (spec 8.1).
FIRST_CONTROL = 199998
NUM_CONTROLS = 60
NAMES = {
    199998: "<|unused|>",
    199999: "<|endoftext|>",
    200000: USER,
    200001: MODEL,
    200002: SYSTEM,
    200003: TOOL,
    200004: TEXT,
    200005: IMAGE,
    200006: END_TURN,
    200008: THINKING,
    200010: END_MESSAGE,
    200020: AUDIO,
    200022: TOOL_ERROR,
    200023: "<|audio|>",
    200024: XML,
    200028: "<|begin_of_text|>",
    200043: AUDIO_END,
    200049: CALL,
    200057: CALL_TEXT,
}


def control_names() -> list[str]:
    """The 60 control tokens in their order."""
    return [NAMES.get(i, f"<|unused_{i}|>") for i in range(FIRST_CONTROL, FIRST_CONTROL + NUM_CONTROLS)]


def is_inkling(control_tokens: Container[str]) -> bool:
    """Whether a tokenizer with these control tokens is made for Inkling's chats."""
    return MODEL in control_tokens and END_MESSAGE in control_tokens
