"""What a kind of short question is, the table of kinds, and the words that questions are made of."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from checkpoints.training import words as w


@dataclass(frozen=True)
class Turn:
    """One question with its thinking and its answer; `system` is a system prompt the answer depends on."""

    question: str
    reasoning: str
    answer: str
    system: str | None = None


Kind = Callable[[Random], Turn]
KINDS: dict[str, Kind] = {}
CLOSED: set[str] = set()  # kinds with so few questions that none is held out of training


def kind(function: Kind) -> Kind:
    """Registers a kind under its function's name."""
    KINDS[function.__name__] = function
    return function


def closed(function: Kind) -> Kind:
    """Registers a kind whose whole question set is trained on."""
    CLOSED.add(function.__name__)
    return kind(function)


def pseudo_word(rng: Random) -> str:
    """A made-up word, so that copying is learned for any word and not for a list."""
    if rng.random() < 0.4:
        return "".join(rng.choice(w.ALPHABETS[0]) for _ in range(rng.randint(1, 7)))
    word = "".join(rng.choice(w.SYLLABLES) for _ in range(rng.choice((2, 2, 3))))
    return word + rng.choice(("", "", "n", "s", "x"))


def any_word(rng: Random) -> str:
    """A word of the small world, sometimes a made-up one."""
    return pseudo_word(rng) if rng.random() < 0.3 else rng.choice(w.PLAIN_WORDS)


def free_word(rng: Random) -> str:
    """Anything a user might type: a word of any script, a number, a word with punctuation."""
    draw = rng.random()
    if draw < 0.45:
        word = rng.choice(w.ENGLISH)
        return word.capitalize() if rng.random() < 0.2 else word
    if draw < 0.6:
        return pseudo_word(rng) + rng.choice(("", "", ".", ",", "!", "?"))
    if draw < 0.7:
        return str(rng.randint(0, 99999))
    if draw < 0.8:
        return pseudo_word(rng).upper()
    return "".join(rng.choice(rng.choice(w.ALPHABETS[1:])) for _ in range(rng.randint(1, 4)))


def some_words(rng: Random, low: int, high: int) -> list[str]:
    """Between `low` and `high` different words."""
    count = rng.randint(low, high)
    chosen: dict[str, None] = {}
    while len(chosen) < count:
        chosen[any_word(rng)] = None
    return list(chosen)
