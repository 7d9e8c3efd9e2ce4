"""Conversations about pictures and tones: what to ask of one, of both, and of one that came some turns ago."""

import zlib
from random import Random
from typing import Any

import numpy as np

from checkpoints.training.conversation import Conversation
from checkpoints.training.corpus import HELD_OUT, draw_turn
from checkpoints.training.inkling.pictures import COLOURS, SHAPES, Picture, draw_picture
from checkpoints.training.inkling.tones import NOTES, Tone, draw_tone
from checkpoints.training.kinds import Turn

MEDIA_KINDS = ("picture", "tone", "picture_and_tone")
SMALL_TALK = ("add", "capital", "opposite", "day", "repeat", "plural")


def is_held_out(media: np.ndarray) -> bool:
    """Whether a picture or tone belongs to the held-out part."""
    return zlib.crc32(media.tobytes()) % HELD_OUT == 0


def a_picture(rng: Random, held: bool) -> Picture:
    """From the wanted part of the split."""
    while is_held_out((picture := draw_picture(rng)).pixels) != held:
        pass
    return picture


def a_tone(rng: Random, held: bool) -> Tone:
    """From the wanted part of the split."""
    while is_held_out((tone := draw_tone(rng)).samples) != held:
        pass
    return tone


def seen(picture: Picture) -> str:
    """What is in a picture, with the article."""
    return f"{'an' if picture.colour[0] in 'aeiou' else 'a'} {picture.colour} {picture.shape}"


def about_picture(rng: Random, picture: Picture) -> Turn:
    """A question about a picture. The thinking always says all there is to see."""
    thought = f"I see {seen(picture)} on {picture.background}."
    draw = rng.random()
    if draw < 0.3:
        ask = rng.choice(("What colour is the shape?", "Which colour does the shape have?", "Name the colour of the "
                          "shape.", f"What colour is the {picture.shape}?"))  # fmt: skip
        return Turn(ask, thought, picture.colour)
    if draw < 0.6:
        ask = rng.choice(("Which shape is this?", "What shape is it?", "What shape is in the picture?",
                          "Name the shape.", f"What is the {picture.colour} shape?"))  # fmt: skip
        return Turn(ask, thought, picture.shape)
    if draw < 0.8:
        ask = rng.choice(("What is in the picture?", "Describe the picture.", "What do you see?",
                          "What does the image show?", "Describe this image."))  # fmt: skip
        told = seen(picture)
        return Turn(ask, thought, told[0].upper() + told[1:] + ".")
    if draw < 0.9:
        ask = rng.choice(("What colour is the background?", "Which colour is behind the shape?"))
        return Turn(ask, thought, picture.background)
    of, values = (picture.colour, COLOURS) if rng.random() < 0.5 else (picture.shape, SHAPES)
    guess = of if rng.random() < 0.5 else rng.choice([value for value in values if value != of])
    ask = f"Is the shape {guess}?" if guess in COLOURS else f"Is it a {guess}?"
    return Turn(ask, thought, "Yes" if guess == of else "No")


def about_tone(rng: Random, tone: Tone) -> Turn:
    """A question about a tone."""
    thought = f"I hear {tone.note}."
    if rng.random() < 0.85:
        ask = rng.choice(("Which note is this?", "What note do you hear?", "Name the note.", "Which note is it?",
                          "What is the pitch of this tone?", "Which note is played?"))  # fmt: skip
        return Turn(ask, thought, tone.note)
    guess = tone.note if rng.random() < 0.5 else rng.choice([note for note in NOTES if note != tone.note])
    return Turn(f"Is the note {guess}?", thought, "Yes" if guess == tone.note else "No")


def about_both(rng: Random, picture: Picture, tone: Tone) -> Turn:
    """One question about a picture and a tone."""
    ask = rng.choice(("What do you see and hear?", "What shape is it, and which note do you hear?",
                      "Name the shape and the note."))  # fmt: skip
    told = f"{seen(picture)} and the note {tone.note}."
    thought = f"I see {seen(picture)} on {picture.background}. I hear {tone.note}."
    return Turn(ask, thought, told[0].upper() + told[1:])


def about(rng: Random, sight: Picture | Tone) -> Turn:
    """A question about either."""
    return about_picture(rng, sight) if isinstance(sight, Picture) else about_tone(rng, sight)


def part(sight: Picture | Tone) -> dict[str, Any]:
    """A picture or tone as a content part that holds its pixels or samples."""
    if isinstance(sight, Picture):
        return {"type": "image", "image": sight.pixels}
    return {"type": "audio", "audio": sight.samples}


def user(rng: Random, question: str, *media: dict[str, Any]) -> dict[str, Any]:
    """A user's message: media before the question, at times behind it."""
    text = {"type": "text", "text": question}
    return {"role": "user", "content": [*media, text] if rng.random() < 0.75 else [text, *media]}


def media_conversation(rng: Random, held: bool, kind: str) -> Conversation:
    """A conversation of one of `MEDIA_KINDS`."""
    thinks = rng.random() < 0.65
    messages: list[dict[str, Any]] = []

    def reply(turn: Turn) -> None:
        thought = {"reasoning_content": turn.reasoning} if thinks else {}
        messages.append({"role": "assistant", "content": turn.answer} | thought)

    if kind == "picture_and_tone":
        picture, tone = a_picture(rng, held), a_tone(rng, held)
        if rng.random() < 0.6:
            turn = about_both(rng, picture, tone)
            messages.append(user(rng, turn.question, *rng.sample((part(picture), part(tone)), 2)))
        else:  # one after the other
            turns = [(part(picture), about_picture(rng, picture)), (part(tone), about_tone(rng, tone))]
            (first, before), (second, turn) = rng.sample(turns, 2)
            messages.append(user(rng, before.question, first))
            reply(before)
            messages.append(user(rng, turn.question, second))
    else:
        sight = a_picture(rng, held) if kind == "picture" else a_tone(rng, held)
        turn = about(rng, sight)
        if rng.random() < 0.15:  # asked again, at times after something else
            before = about(rng, sight)
            messages.append(user(rng, before.question, part(sight)))
            reply(before)
            if rng.random() < 0.5:
                between = draw_turn(rng, rng.choice(SMALL_TALK), False)
                messages.append({"role": "user", "content": between.question})
                reply(between)
            messages.append({"role": "user", "content": turn.question})
        else:
            messages.append(user(rng, turn.question, part(sight)))
    return Conversation(kind, messages, turn.answer, turn.reasoning, enable_thinking=thinks)
