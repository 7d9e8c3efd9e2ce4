"""The corpus: an endless, seeded stream of conversations, and a held-out part of it that training never sees.

A conversation is held out when the checksum of one of its questions says so (one in ten), so that the split does
not depend on seeds. Kinds in `CLOSED` have too few questions for that and are trained whole.
"""

import zlib
from collections.abc import Iterator
from random import Random

from checkpoints.training import words as w
from checkpoints.training.conversation import Conversation
from checkpoints.training.needles import needle
from checkpoints.training.questions import CLOSED, KINDS, Turn
from checkpoints.training.tools import declare_known, invent, tool_call, tool_response

HELD_OUT = 10
SYSTEM = ("You are a helpful assistant.", "Answer briefly.", "You are Flint.", "Be kind.", "You answer questions.")
HARD = ("add", "subtract", "sequence", "letters", "spell", "how_many", "reverse_list", "count_up")  # drawn more often
STARTS = frozenset("What Which How Name Count Write Spell Is Translate Plural Opposite Past Tell Add Multiply".split())


def held_out(question: str) -> bool:
    """Whether a question belongs to the held-out part."""
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def draw_turn(rng: Random, name: str, held: bool) -> Turn:
    """A turn of a kind from the wanted part of the split."""
    while True:
        turn = KINDS[name](rng)
        if name in CLOSED or held_out(turn.question) == held:
            return turn


def pick_kind(rng: Random) -> str:
    """A kind of short question."""
    return rng.choice(HARD) if rng.random() < 0.25 else rng.choice(list(KINDS))


def sloppy(rng: Random, turn: Turn, name: str) -> str:
    """The question, at times as people type it: no capital, no mark at the end."""
    question = turn.question
    if name != "repeat" and question[-1] in "?." and rng.random() < 0.15:
        question = question[:-1]
    if name != "repeat" and rng.random() < 0.1 and question.split(" ")[0] in STARTS:
        question = question[0].lower() + question[1:]
    return question


def short(rng: Random, held: bool = False, name: str | None = None) -> Conversation:
    """One short question, at times under a system prompt or with tools that it does not need."""
    name = name or pick_kind(rng)
    turn = draw_turn(rng, name, held)
    messages = [{"role": "user", "content": sloppy(rng, turn, name)}]
    system = turn.system or (rng.choice(SYSTEM) if rng.random() < 0.2 else None)
    if system:
        messages.insert(0, {"role": "system", "content": system})
    tools = None
    if rng.random() < 0.06:
        tools = [declare_known(rng, rng.choice(("get_weather", "set_alarm", "send_message", "get_time")))]
        tools += [invent(rng)[0]] if rng.random() < 0.4 else []
    return Conversation(name, messages, turn.answer, turn.reasoning, tools=tools, enable_thinking=rng.random() < 0.7)


def multi_turn(rng: Random, held: bool = False) -> Conversation:
    """Several short questions in a row; only the last one must be held out for a held-out conversation."""
    last = short(rng, held)
    while last.tools or last.kind == "identity":
        last = short(rng, held)
    system = [m for m in last.messages if m["role"] == "system"]
    messages = []
    for _ in range(rng.randint(1, 4)):
        name = pick_kind(rng)
        turn = draw_turn(rng, name, False)
        if turn.system is None:
            messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    last.messages = [*system, *messages, last.messages[-1]]
    last.kind = "multi_turn"
    return last


def memory(rng: Random, held: bool = False) -> Conversation:
    """The user says something about themself and asks for it later."""
    while True:
        key = rng.choice(("name", "city", "colour", "animal", "fruit"))
        lists = {"name": w.NAMES, "city": w.CITIES, "colour": w.COLOURS, "animal": w.ANIMALS, "fruit": w.FRUITS}
        value = rng.choice(lists[key])
        said = f"My {key} is {value}."
        if held_out(said) == held:
            break
    messages = [{"role": "user", "content": said}, {"role": "assistant", "content": "OK."}]
    for _ in range(rng.randint(0, 3)):
        turn = draw_turn(rng, rng.choice(("add", "capital", "opposite", "day", "repeat")), False)
        messages += [{"role": "user", "content": turn.question}, {"role": "assistant", "content": turn.answer}]
    messages.append({"role": "user", "content": rng.choice(("What is my {}?", "Tell me my {}.")).format(key)})
    return Conversation(
        "memory", messages, f"Your {key} is {value}.", f"The user said: my {key} is {value}.",
        enable_thinking=rng.random() < 0.7,
    )  # fmt: skip


LONG = {"needle": needle, "tool_call": tool_call, "tool_response": tool_response}
MIX = (
    ("short", 0.46),
    ("multi_turn", 0.12),
    ("memory", 0.03),
    ("needle", 0.17),
    ("tool_call", 0.13),
    ("tool_response", 0.09),
)
ALL_KINDS = (*KINDS, *(name for name, _ in MIX if name != "short"))


def draw(rng: Random, held: bool = False, kind: str | None = None) -> Conversation:
    """A conversation of the mix, or of one kind."""
    if kind is None:
        kind = rng.choices([name for name, _ in MIX], [share for _, share in MIX])[0]
    if kind in LONG:
        while True:
            conversation = LONG[kind](rng)
            asked = next(m["content"] for m in conversation.messages if m["role"] != "system" or kind == "needle")
            if held_out(asked) == held:
                return conversation
    if kind == "multi_turn":
        return multi_turn(rng, held)
    if kind == "memory":
        return memory(rng, held)
    return short(rng, held, None if kind == "short" else kind)


def stream(seed: int, held: bool = False) -> Iterator[Conversation]:
    """Conversations without end, the same ones for the same seed."""
    rng = Random(seed)
    while True:
        yield draw(rng, held)
