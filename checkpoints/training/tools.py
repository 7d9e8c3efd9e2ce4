"""Tool conversations: which of the declared tools to call, with which arguments, and what its result says."""

import json
from random import Random
from typing import Any

from checkpoints.training import words as w
from checkpoints.training.conversation import Conversation, call_message, value_text
from checkpoints.training.kinds import any_word, pseudo_word

Request = tuple[str, dict[str, Any]]  # what the user asks, and the arguments that follow from it


def _weather(rng: Random) -> Request:
    city = _place(rng)
    if rng.random() < 0.3:
        days = rng.randint(2, 9)
        ask = rng.choice(
            ("What is the weather in {} for {} days?", "What will the weather be in {} for the next {} days?")
        )
        return ask.format(city, days), {"city": city, "days": days}
    ask = rng.choice(("What is the weather in {}?", "How is the weather in {}?", "What is the weather like in {}?",
                      "What's the weather in {}?", "Weather in {}?", "Tell me the weather in {}.",
                      "What is the weather in {} today?", "what is the weather in {}"))  # fmt: skip
    return ask.format(city), {"city": city}


def _time(rng: Random) -> Request:
    city = _place(rng)
    return rng.choice(("What time is it in {}?", "Tell me the time in {}.")).format(city), {"city": city}


def _alarm(rng: Random) -> Request:
    hour, minute = rng.randint(0, 23), rng.randint(0, 59)
    ask = rng.choice(("Set an alarm for {}:{:02}.", "Wake me at {}:{:02}."))
    return ask.format(hour, minute), {"hour": hour, "minute": minute}


def _message(rng: Random) -> Request:
    name, text = _person(rng), " ".join(any_word(rng) for _ in range(rng.randint(1, 5)))
    ask = rng.choice(("Send a message to {}: {}", "Write to {}: {}"))
    return ask.format(name, text), {"to": name, "text": text}


def _song(rng: Random) -> Request:
    title = " ".join(any_word(rng).capitalize() for _ in range(rng.randint(1, 3)))
    loud = rng.random() < 0.5
    return f"Play the song {title} {'loud' if loud else 'quiet'}.", {"title": title, "loud": loud}


def _table(rng: Random) -> Request:
    name, people = _person(rng), rng.randint(1, 12)
    return f"Book a table for {people} people for {name}.", {"name": name, "people": people}


def _buy(rng: Random) -> Request:
    item, count = any_word(rng), rng.randint(1, 99)
    return rng.choice(("Buy {} of {}.", "Order {} of {}.")).format(count, item), {"item": item, "count": count}


def _light(rng: Random) -> Request:
    room, on = rng.choice(w.PLACES), rng.random() < 0.5
    return f"Turn {'on' if on else 'off'} the light in the {room}.", {"room": room, "on": on}


def _sum(rng: Random) -> Request:
    a, b = rng.randint(0, 9999), rng.randint(0, 9999)
    return f"Use the calculator: {a} + {b}", {"a": a, "b": b}


def _search(rng: Random) -> Request:
    query = " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))
    return rng.choice(("Search for {}.", "Search the web for {}.", "Look up {}.")).format(query), {"query": query}


def _place(rng: Random) -> str:
    return rng.choice(w.CITIES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()


def _person(rng: Random) -> str:
    return rng.choice(w.NAMES) if rng.random() < 0.7 else pseudo_word(rng).capitalize()


KNOWN = {
    "get_weather": (
        _weather, ("Get the weather in a city.", "Current weather", "The weather of a city"),
        {"city": "string", "days": "integer"},
    ),
    "get_time": (_time, ("Get the time in a city.", "The local time"), {"city": "string"}),
    "set_alarm": (_alarm, ("Set an alarm.", "Wake the user"), {"hour": "integer", "minute": "integer"}),
    "send_message": (
        _message, ("Send a message to a person.", "Write to somebody"), {"to": "string", "text": "string"},
    ),
    "play_song": (_song, ("Play a song.", "Music"), {"title": "string", "loud": "boolean"}),
    "book_table": (_table, ("Book a table.", "Reserve a table for people"), {"name": "string", "people": "integer"}),
    "buy_item": (_buy, ("Buy something.", "Order an item"), {"item": "string", "count": "integer"}),
    "switch_light": (_light, ("Turn a light on or off.", "Light in a room"), {"room": "string", "on": "boolean"}),
    "add_numbers": (_sum, ("Add two numbers.", "A calculator"), {"a": "integer", "b": "integer"}),
    "search_web": (_search, ("Search the web.", "Find pages"), {"query": "string"}),
}  # fmt: skip


def declare(rng: Random, name: str, types: dict[str, str], about: tuple[str, ...] = ()) -> dict[str, Any]:
    """A tool in OpenAI's shape, with or without the fields that clients leave out or add."""
    properties: dict[str, Any] = {}
    described = rng.random() < 0.4
    for key, kind in types.items():
        properties[key] = {"type": kind} | ({"description": f"The {key}"} if described and rng.random() < 0.7 else {})
    if name == "get_weather" and rng.random() < 0.25:
        properties["unit"] = {"type": "string", "enum": ["celsius", "fahrenheit"]}
    parameters: dict[str, Any] = {"type": "object", "properties": properties}
    if rng.random() < 0.6:
        parameters["required"] = list(types) if rng.random() < 0.5 else list(types)[:1]
    if rng.random() < 0.15:
        parameters["additionalProperties"] = False
    function: dict[str, Any] = {"name": name}
    if rng.random() < 0.75:
        function["description"] = rng.choice(about) if about else f"{name.replace('_', ' ').capitalize()}."
    function["parameters"] = parameters
    return {"type": "function", "function": function}


def declare_known(rng: Random, name: str, used: dict[str, Any] | None = None) -> dict[str, Any]:
    """One of the ten known tools; parameters that the request does not use may be absent."""
    _, about, types = KNOWN[name]
    if used is None or rng.random() < 0.5:
        types = {key: kind for key, kind in types.items() if used is None or key in used or rng.random() < 0.5}
    return declare(rng, name, types, about)


def invent(rng: Random) -> tuple[dict[str, Any], dict[str, Any]]:
    """A tool nobody has seen, and arguments for it."""
    verb = rng.choice(
        ("find", "get", "make", "set", "move", "check", "open", "add", "send", "search", pseudo_word(rng))
    )
    name = rng.choice(
        (f"{verb}_{any_word(rng)}", f"{verb}_{any_word(rng)}", f"{verb}_{rng.choice(w.ENGLISH)}", verb, any_word(rng))
    )
    keys = list(
        dict.fromkeys(
            rng.choice(("size", "level", "a", "b", "x", "mode", rng.choice(w.ENGLISH), any_word(rng)))
            for _ in range(rng.randint(1, 3))
        )
    )
    draw = {
        "string": lambda: any_word(rng), "integer": lambda: rng.randint(0, 999), "boolean": lambda: rng.random() < 0.5,
        "number": lambda: round(rng.uniform(0, 10), 1),
    }  # fmt: skip
    types = {key: rng.choice(("string", "string", "integer", "integer", "boolean", "number")) for key in keys}
    arguments = {key: draw[kind]() for key, kind in types.items()}
    extra = {pseudo_word(rng): "string"} if rng.random() < 0.2 else {}
    return declare(rng, name, types | extra), arguments


def thought(calls: list[tuple[str, dict[str, Any]]]) -> str:
    """What to think before calling: the tool and its arguments."""
    parts = [
        f"{name} with {', '.join(f'{k} {value_text(v)}' for k, v in arguments.items())}" for name, arguments in calls
    ]
    return f"I call {' and '.join(parts)}."


def tool_call(rng: Random) -> Conversation:
    """A request for one of the declared tools: known by its meaning, or named outright; some ask for two calls."""
    tools = [declare_known(rng, name) for name in rng.sample(list(KNOWN), rng.randint(0, 2))]
    draw = rng.random()
    if draw < 0.6:
        name = rng.choice(list(KNOWN)) if rng.random() < 0.75 else "get_weather"
        question, arguments = KNOWN[name][0](rng)
        calls, wanted = [(name, arguments)], declare_known(rng, name, arguments)
    elif draw < 0.7:
        name, (first, second) = rng.choice(("get_weather", "get_time")), rng.sample(w.CITIES, 2)
        ask = "What is the weather in {} and in {}?" if name == "get_weather" else "What time is it in {} and in {}?"
        question, calls = ask.format(first, second), [(name, {"city": first}), (name, {"city": second})]
        wanted = declare_known(rng, name, {"city": ""})
    else:
        wanted, arguments = invent(rng)
        name = wanted["function"]["name"]
        gap, join = rng.choice((" ", " ", "=")), rng.choice((" and ", ", "))
        stated = join.join(f"{key}{gap}{value_text(value)}" for key, value in arguments.items())
        ask = rng.choice(("Call {} with {}.", "Use {} with {}.", "Please call {} with {}.", "Use the {} tool with {}."))
        question = ask.format(name, stated)
        calls = [(name, arguments)]
    tools = [tool for tool in tools if tool["function"]["name"] != name]
    if rng.random() < 0.3:
        tools.append(invent(rng)[0])
    tools.insert(rng.randint(0, len(tools)), wanted)
    messages: list[dict[str, Any]] = [{"role": "user", "content": question}]
    if rng.random() < 0.15:
        messages.insert(
            0, {"role": "system", "content": rng.choice(("You can call tools.", "You are a helpful assistant."))}
        )
    return Conversation(
        "tool_call",
        messages,
        tools=tools,
        tool_calls=calls,
        reasoning=thought(calls),
        enable_thinking=rng.random() < 0.75,
    )


def result_of(rng: Random, name: str) -> dict[str, Any]:
    """What a tool returns, as key and value pairs."""
    if name == "get_weather":
        return {"temperature": rng.randint(-20, 40), "sky": rng.choice(w.SKIES)}
    if name == "get_time":
        return {"time": f"{rng.randint(0, 23)}:{rng.randint(0, 59):02}"}
    keys = dict.fromkeys(
        rng.choice(("result", "status", "answer", "size", "colour", any_word(rng))) for _ in range(rng.randint(1, 2))
    )
    return {key: any_word(rng) if rng.random() < 0.5 else rng.randint(0, 9999) for key in keys}


def say(result: dict[str, Any]) -> str:
    """The sentence that tells a result."""
    told = " and ".join(f"the {key} is {value_text(value)}" for key, value in result.items())
    return told[0].upper() + told[1:] + "."


def tool_response(rng: Random) -> Conversation:
    """A call and its result: JSON is told as a sentence, plain text is passed on."""
    before = tool_call(rng)
    replies, sentences = [], []
    for i, (name, _) in enumerate(before.tool_calls):
        if rng.random() < 0.8:
            result = result_of(rng, name)
            text, sentence = json.dumps(result, ensure_ascii=False), say(result)
        else:
            text = " ".join(any_word(rng) for _ in range(rng.randint(1, 4)))
            sentence = f"The tool says {text}."
        replies.append({"role": "tool", "tool_call_id": f"call_{i}", "content": text})
        sentences.append(sentence)
    history = call_message(before.tool_calls, before.reasoning if before.enable_thinking else None)
    return Conversation(
        "tool_response", [*before.messages, history, *replies], tools=before.tools, content=" ".join(sentences),
        reasoning="I tell the result.", enable_thinking=before.enable_thinking,
    )  # fmt: skip
