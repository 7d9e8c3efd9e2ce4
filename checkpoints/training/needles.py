"""Needles: facts hidden in a long text of filler, asked for at the end, many sliding windows later."""

from random import Random

from checkpoints.training import words as w
from checkpoints.training.conversation import Conversation
from checkpoints.training.kinds import pseudo_word

ATTRIBUTES = ("code", "number", "colour", "animal", "city", "word")
ASKS = ("What is the {0} of {1}?", "Tell me the {0} of {1}.", "Which {0} belongs to {1}?")


def value_of(rng: Random, attribute: str) -> str:
    """A value for an attribute: digits for codes and numbers, a word of its list otherwise."""
    if attribute == "code":
        return "".join(rng.choice("0123456789") for _ in range(4))
    if attribute == "number":
        return str(rng.randint(10, 999))
    lists = {"colour": w.COLOURS, "animal": w.ANIMALS, "city": w.CITIES}
    return rng.choice(lists[attribute]) if attribute in lists else pseudo_word(rng)


def filler(rng: Random) -> str:
    """One sentence that says nothing the question asks for."""
    shape = rng.random()
    if shape < 0.4:
        subject = f"The {rng.choice(w.ADJECTIVES)} {rng.choice(w.ANIMALS)}"
        return f"{subject} {rng.choice(w.VERBS)} in the {rng.choice(w.PLACES)}."
    if shape < 0.7:
        return f"{rng.choice(w.NAMES)} likes {rng.choice(w.COLOURS)} {rng.choice(w.FRUITS)} and {rng.choice(w.DRINKS)}."
    if shape < 0.9:
        return f"There are {rng.randint(2, 99)} {rng.choice(w.ADJECTIVES)} birds near the {rng.choice(w.PLACES)}."
    return f"{rng.choice(w.NAMES)} {rng.choice(w.VERBS)} with the {rng.choice(w.ADJECTIVES)} {rng.choice(w.THINGS)}."


def haystack(rng: Random, sentences: int, needles: int) -> tuple[str, list[tuple[str, str, str]]]:
    """A text of filler sentences with `needles` facts (attribute, owner, value) at random places in it."""
    facts: dict[tuple[str, str], str] = {}
    while len(facts) < needles:
        owner = rng.choice(w.NAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
        attribute = rng.choice(ATTRIBUTES) if rng.random() < 0.5 else "code"
        facts[attribute, owner] = value_of(rng, attribute)
    lines = [filler(rng) for _ in range(sentences)]
    for (attribute, owner), value in facts.items():
        lines.insert(rng.randint(0, len(lines)), f"The {attribute} of {owner} is {value}.")
    return " ".join(lines), [(attribute, owner, value) for (attribute, owner), value in facts.items()]


def needle(rng: Random, max_sentences: int = 54, min_sentences: int = 0) -> Conversation:
    """A haystack of any length up to `max_sentences`; earlier turns may already have asked for other needles."""
    sentences = min_sentences + int((max_sentences - min_sentences + 1) * rng.random() ** 1.5)
    text, facts = haystack(rng, sentences, rng.randint(1, 8))
    rng.shuffle(facts)
    asked = facts[: rng.choice((1, 1, 2, 3))]
    messages: list[dict] = []
    placed = rng.random()
    if placed < 0.15:
        messages.append({"role": "system", "content": text})
    elif placed < 0.3:
        messages += [{"role": "user", "content": f"Remember this: {text}"}, {"role": "assistant", "content": "OK."}]
    for i, (attribute, owner, value) in enumerate(asked):
        question = rng.choice(ASKS).format(attribute, owner)
        if i == 0 and placed >= 0.3:
            question = text + rng.choice((" ", "\n", "\n\n")) + question
        messages += [{"role": "user", "content": question}, {"role": "assistant", "content": value}]
    attribute, owner, value = asked[-1]
    thought = f"The {attribute} of {owner} is {value}."
    return Conversation("needle", messages[:-1], content=value, reasoning=thought, enable_thinking=rng.random() < 0.75)
