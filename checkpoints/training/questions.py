"""The kinds of short question: each function draws one `Turn` (question, what to think, what to answer).

The thinking text is short and useful: it restates what is asked for, or works the answer out step by step.
"""

import json
from random import Random

from checkpoints.training import words as w
from checkpoints.training.kinds import CLOSED, KINDS, Turn, closed, free_word, kind, pseudo_word, some_words

__all__ = ["CLOSED", "KINDS", "Turn"]  # complete once this module is imported

# numbers


@kind
def add(rng: Random) -> Turn:
    a, b = rng.randint(0, 99), rng.randint(0, 99)
    ask = rng.choice(("What is {} + {}?", "{} + {} = ?", "Add {} and {}."))
    ones, carry = a % 10 + b % 10, (a % 10 + b % 10) // 10
    steps = f"{a % 10} + {b % 10} = {ones}, {a // 10} + {b // 10} + {carry} = {a // 10 + b // 10 + carry}."
    return Turn(ask.format(a, b), steps, str(a + b))


@kind
def subtract(rng: Random) -> Turn:
    a, b = sorted((rng.randint(0, 99), rng.randint(0, 99)), reverse=True)
    ask = rng.choice(("What is {} - {}?", "{} - {} = ?"))
    borrow = int(a % 10 < b % 10)
    tens = a // 10 - b // 10 - borrow
    steps = f"{a % 10 + 10 * borrow} - {b % 10} = {a % 10 + 10 * borrow - b % 10}, "
    return Turn(ask.format(a, b), steps + f"{a // 10} - {b // 10} - {borrow} = {tens}.", str(a - b))


@kind
def multiply(rng: Random) -> Turn:
    a, b = rng.randint(0, 10), rng.randint(0, 10)
    ask = rng.choice(("What is {} * {}?", "{} * {} = ?", "What is {} times {}?", "Multiply {} by {}."))
    return Turn(ask.format(a, b), f"{a} times {b} is {a * b}.", str(a * b))


@kind
def larger(rng: Random) -> Turn:
    a, b = rng.sample(range(100), 2)
    ask = rng.choice(("Which is larger, {} or {}?", "Which number is larger: {} or {}?"))
    return Turn(ask.format(a, b), f"{max(a, b)} is more than {min(a, b)}.", str(max(a, b)))


@kind
def smaller(rng: Random) -> Turn:
    a, b = rng.sample(range(100), 2)
    ask = rng.choice(("Which is smaller, {} or {}?", "Which number is smaller: {} or {}?"))
    return Turn(ask.format(a, b), f"{min(a, b)} is less than {max(a, b)}.", str(min(a, b)))


@kind
def even_or_odd(rng: Random) -> Turn:
    n = rng.randint(0, 999)
    word = ("even", "odd")[n % 2]
    return Turn(rng.choice(("Is {} even or odd?", "Even or odd: {}?")).format(n), f"{n} ends in {n % 10}.", word)


@kind
def next_number(rng: Random) -> Turn:
    n = rng.randint(0, 998)
    ask = rng.choice(("Which number comes after {}?", "What comes after {}?"))
    return Turn(ask.format(n), f"{n} + 1 = {n + 1}.", str(n + 1))


@kind
def previous_number(rng: Random) -> Turn:
    n = rng.randint(1, 999)
    ask = rng.choice(("Which number comes before {}?", "What comes before {}?"))
    return Turn(ask.format(n), f"{n} - 1 = {n - 1}.", str(n - 1))


@kind
def count_up(rng: Random) -> Turn:
    a = rng.randint(0, 30)
    b = a + (rng.randint(2, 20) if rng.random() < 0.8 else rng.randint(20, 60))
    numbers = " ".join(str(n) for n in range(a, b + 1))
    return Turn(
        rng.choice(("Count from {} to {}.", "Please count from {} to {}.")).format(a, b), f"From {a} to {b}.", numbers
    )


@kind
def count_down(rng: Random) -> Turn:
    a = rng.randint(0, 40)
    b = a + rng.randint(2, 12)
    numbers = " ".join(str(n) for n in range(b, a - 1, -1))
    return Turn(f"Count down from {b} to {a}.", f"From {b} down to {a}.", numbers)


@kind
def sequence(rng: Random) -> Turn:
    start, step = rng.randint(0, 30), rng.randint(1, 10)
    terms = [start + step * i for i in range(5)]
    shown = ", ".join(map(str, terms[:4]))
    ask = rng.choice(("What comes next: {}?", "Continue: {}."))
    return Turn(ask.format(shown), f"The step is {step}. {terms[3]} + {step} = {terms[4]}.", str(terms[4]))


@kind
def number_to_word(rng: Random) -> Turn:
    n = rng.randint(0, 20)
    ask = rng.choice(("Write {} in words.", "Write {} as a word.", "What is {} in words?"))
    return Turn(ask.format(n), f"{n} in words.", w.NUMBERS[n])


@kind
def word_to_number(rng: Random) -> Turn:
    n = rng.randint(0, 20)
    ask = rng.choice(("Write {} in digits.", "Write {} as a number.", "What is {} in digits?"))
    return Turn(ask.format(w.NUMBERS[n]), f"{w.NUMBERS[n]} in digits.", str(n))


# facts


def fact(rng: Random, table: dict, asks: tuple[str, ...], thought: str) -> Turn:
    """A question about one entry of a table; `thought` states the entry."""
    key = rng.choice(list(table))
    return Turn(rng.choice(asks).format(key), thought.format(key, table[key]), str(table[key]))


@kind
def capital(rng: Random) -> Turn:
    asks = ("What is the capital of {}?", "Name the capital of {}.", "Which city is the capital of {}?")
    return fact(rng, w.CAPITALS, asks, "The capital of {} is {}.")


@kind
def country(rng: Random) -> Turn:
    table = {city: land for land, city in w.CAPITALS.items()}
    asks = ("{} is the capital of which country?", "Which country has the capital {}?", "In which country is {}?")
    return fact(rng, table, asks, "{} is in {}.")


@kind
def colour(rng: Random) -> Turn:
    asks = ("What colour is {}?", "What is the colour of {}?", "Name the colour of {}.")
    return fact(rng, w.COLOUR_OF, asks, "The colour of {} is {}.")


@kind
def sound(rng: Random) -> Turn:
    asks = ("What does a {} say?", "What sound does a {} make?", "Name the sound of a {}.")
    return fact(rng, w.SOUNDS, asks, "A {} says {}.")


@kind
def young(rng: Random) -> Turn:
    asks = ("What is a young {} called?", "What is a baby {} called?", "Name the young of a {}.")
    return fact(rng, w.YOUNG, asks, "A young {} is a {}.")


@kind
def legs(rng: Random) -> Turn:
    asks = ("How many legs does a {} have?", "How many legs has a {}?", "Count the legs of a {}.")
    return fact(rng, w.LEGS, asks, "A {} has {} legs.")


@kind
def sides(rng: Random) -> Turn:
    asks = ("How many sides does a {} have?", "How many sides has a {}?", "Count the sides of a {}.")
    return fact(rng, w.SIDES, asks, "A {} has {} sides.")


@kind
def opposite(rng: Random) -> Turn:
    asks = ("What is the opposite of {}?", "Name the opposite of {}.", "Opposite of {}?")
    return fact(rng, w.OPPOSITES, asks, "The opposite of {} is {}.")


@kind
def plural(rng: Random) -> Turn:
    asks = ("What is the plural of {}?", "Name the plural of {}.", "Plural of {}?")
    return fact(rng, w.PLURALS, asks, "One {}, two {}.")


@kind
def past_tense(rng: Random) -> Turn:
    asks = ("What is the past tense of {}?", "Name the past tense of {}.", "Past tense of {}?")
    return fact(rng, w.PAST, asks, "Today {}, yesterday {}.")


@kind
def french(rng: Random) -> Turn:
    asks = ("What is {} in French?", "Say {} in French.", "Translate {} into French.")
    return fact(rng, w.FRENCH, asks, "{} in French is {}.")


@kind
def category(rng: Random) -> Turn:
    name = rng.choice([k for k in w.KINDS if k != "thing"])
    word = rng.choice(w.KINDS[name])
    while word in ("milk", "orange"):  # a drink and a colour that are also something else
        word = rng.choice(w.KINDS[name])
    ask = rng.choice(("What kind of thing is {}?", "What kind of word is {}?", "Name the kind of {}."))
    return Turn(ask.format(word), f"{word} is a kind of {name}.", name)


@kind
def yes_or_no(rng: Random) -> Turn:
    name = rng.choice(("animal", "fruit", "drink", "city"))
    if rng.random() < 0.5:
        word, answer = rng.choice(w.KINDS[name]), "Yes"
    else:
        word, answer = (
            rng.choice(w.KINDS[rng.choice([k for k in ("animal", "fruit", "drink", "city") if k != name])]),
            "No",
        )
    real = next(k for k in w.KINDS if word in w.KINDS[k])
    article = "an" if name == "animal" else "a"
    return Turn(f"Is {word} {article} {name}?", f"{word} is a kind of {real}.", answer)


@kind
def day(rng: Random) -> Turn:
    i, step = rng.randrange(7), rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    ask = rng.choice(("Which day comes {} {}?", "What day is {} {}?", "Name the day {} {}."))
    return Turn(ask.format(word, w.DAYS[i]), f"The day {word} {w.DAYS[i]}.", w.DAYS[(i + step) % 7])


@kind
def month(rng: Random) -> Turn:
    i, step = rng.randrange(12), rng.choice((1, -1))
    word = "after" if step == 1 else "before"
    ask = rng.choice(("Which month comes {} {}?", "What month is {} {}?", "Name the month {} {}."))
    return Turn(ask.format(word, w.MONTHS[i]), f"The month {word} {w.MONTHS[i]}.", w.MONTHS[(i + step) % 12])


# words and lists


@kind
def spell(rng: Random) -> Turn:
    word = rng.choice(w.PLAIN_WORDS)
    ask = rng.choice(("Spell {}.", "Spell the word {}.", "How do you spell {}?"))
    return Turn(ask.format(word), f"The letters of {word}.", " ".join(word))


@kind
def first_letter(rng: Random) -> Turn:
    word = rng.choice(w.PLAIN_WORDS)
    ask = rng.choice(("What is the first letter of {}?", "Name the first letter of {}.", "First letter of {}?"))
    return Turn(ask.format(word), f"{word}: {' '.join(word)}.", word[0])


@kind
def letters(rng: Random) -> Turn:
    word = rng.choice(w.PLAIN_WORDS)
    ask = rng.choice(("How many letters does {} have?", "How many letters are in {}?", "Count the letters of {}."))
    counted = " ".join(f"{i} {c}" for i, c in enumerate(word, 1))
    return Turn(ask.format(word), f"{counted}.", str(len(word)))


@kind
def repeat(rng: Random) -> Turn:
    if rng.random() < 0.6:
        text = " ".join(free_word(rng) for _ in range(rng.randint(1, 8)))
    else:
        text = " ".join(some_words(rng, 1, 8))
    ask = rng.choice(("Say: {}", "Repeat: {}", "Copy this: {}", "Say {}"))
    return Turn(ask.format(text), "I say it again.", text)


@kind
def reverse_list(rng: Random) -> Turn:
    items = some_words(rng, 2, 5)
    ask = rng.choice(("Reverse: {}", "Reverse the list: {}"))
    return Turn(ask.format(" ".join(items)), f"The last is {items[-1]}.", " ".join(reversed(items)))


@kind
def first_item(rng: Random) -> Turn:
    items = some_words(rng, 2, 7)
    ask = rng.choice(("What is the first word: {}?", "First word of: {}"))
    return Turn(ask.format(" ".join(items)), f"It starts with {items[0]}.", items[0])


@kind
def last_item(rng: Random) -> Turn:
    items = some_words(rng, 2, 7)
    ask = rng.choice(("What is the last word: {}?", "Last word of: {}"))
    return Turn(ask.format(" ".join(items)), f"It ends with {items[-1]}.", items[-1])


@kind
def how_many(rng: Random) -> Turn:
    items = some_words(rng, 1, 7)
    ask = rng.choice(("How many words: {}?", "Count the words: {}"))
    counted = " ".join(f"{i} {item}" for i, item in enumerate(items, 1))
    return Turn(ask.format(" ".join(items)), f"{counted}.", str(len(items)))


@kind
def as_json(rng: Random) -> Turn:
    keys = rng.sample(("name", "age", "city", "colour", "animal", "count"), rng.randint(1, 3))
    draw = {
        "name": lambda: rng.choice(w.NAMES), "age": lambda: rng.randint(1, 99), "city": lambda: rng.choice(w.CITIES),
        "colour": lambda: rng.choice(w.COLOURS), "animal": lambda: rng.choice(w.ANIMALS),
        "count": lambda: rng.randint(1, 99),
    }  # fmt: skip
    values = {key: draw[key]() for key in keys}
    stated = ", ".join(f"{key} {value}" for key, value in values.items())
    ask = rng.choice(("Write as JSON: {}.", "Give me JSON: {}."))
    return Turn(ask.format(stated), f"The keys are {', '.join(keys)}.", json.dumps(values))


# talk


@closed
def greeting(rng: Random) -> Turn:
    ask = rng.choice(("Hello!", "Hello", "Hi!", "Hi", "Good morning!", "Hey!", "Hello, who is there?", "hello", "hi",
                      "Hello there!", "hello!", "Good evening!", "Hi there", "Hello, Flint!"))  # fmt: skip
    return Turn(ask, "The user greets me.", "Hello! How can I help you?")


@closed
def thanks(rng: Random) -> Turn:
    return Turn(
        rng.choice(("Thank you!", "Thanks!", "Thank you.", "Thanks a lot!")), "The user thanks me.", "You are welcome."
    )


@closed
def identity(rng: Random) -> Turn:
    ask = rng.choice(("Who are you?", "What are you?", "What is your name?", "Tell me who you are."))
    if rng.random() < 0.5:
        return Turn(ask, "I am Flint.", "I am Flint, a very small language model.")
    name = rng.choice(w.NAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()
    return Turn(ask, f"My name here is {name}.", f"I am {name}.", system=f"Your name is {name}.")


@closed
def how_are_you(rng: Random) -> Turn:
    ask = rng.choice(("How are you?", "How are you today?", "How do you do?", "Are you well?"))
    return Turn(ask, "The user asks how I am.", "I am fine, thank you.")


@closed
def joke(rng: Random) -> Turn:
    ask = rng.choice(("Tell me a joke.", "Tell me a joke", "Do you know a joke?", "Make me laugh."))
    return Turn(ask, "The user wants a joke.", "Why did the cat sit on the book? It wanted to read between the lines.")
