"""Reading a `config.json` field by field, so that one message names everything wrong with it."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from typing import Any

from modeling.errors import CheckpointError

log = logging.getLogger(__name__)

# A damaged number must end in a sentence, not in a list of a billion layers.
MAX_LAYERS, MAX_SIZE = 1000, 1 << 24

_KIND_NAMES = {
    int: "an integer", float: "a finite number", bool: "true or false", list: "a list", dict: "an object"
}  # fmt: skip


class ConfigReader:
    """Reads fields one by one, notes which were used, and collects faults instead of stopping at the first.

    Args:
        raw: the parsed JSON object. family: the model's name, for messages.
        ignored: keys that change nothing at inference, so that any other unread key can be reported as unknown.

    Attributes:
        faults: sentences, shared with the readers of nested blocks.
    """

    def __init__(self, raw: Mapping[str, Any], family: str, ignored: Iterable[str] = ()):
        self.raw, self.family, self.prefix = raw, family, ""
        self.used: set[str] = set(ignored)
        self.faults: list[str] = []
        self.blocks: list[ConfigReader] = []

    def block(self, name: str, ignored: Iterable[str] = ()) -> ConfigReader | None:
        """The reader of a nested object, or None when it is absent."""
        raw = self.field(name, dict)
        if raw is None:
            return None
        nested = ConfigReader(raw, self.family, ignored)
        nested.prefix, nested.faults = f"{self.prefix}{name}.", self.faults
        self.blocks.append(nested)
        return nested

    def field(self, name: str, kind: type, default: Any = None, required: bool = False, alias: str = "") -> Any:
        """A field's value; the default when it is absent, null or ill-typed. `alias` is another spelling of it."""
        self.used |= {name, alias}
        given = {key: self.raw[key] for key in (name, alias) if self.raw.get(key) is not None}
        if not given:
            if required:
                self.fault(name, "is missing")
            return default
        key, value = next(iter(given.items()))
        if len(given) > 1 and given[alias] != value:
            self.fault(key, f"= {value!r:.60} and {alias} = {given[alias]!r:.60} disagree")
        numeric = kind in (int, float) and isinstance(value, bool)
        if kind is float and isinstance(value, int) and not isinstance(value, bool) and abs(value) < 1e30:
            value = float(value)
        if not isinstance(value, kind) or numeric or (kind is float and not math.isfinite(value)):
            self.fault(key, f"must be {_KIND_NAMES[kind]}, not {value!r:.60}")
            return default
        return value

    def size(self, name: str, default: int | None = None, alias: str = "", limit: int = MAX_SIZE) -> int:
        """A dimension, required when there is no default; 1 stands in for an unusable one."""
        value = self.field(name, int, 1 if default is None else default, default is None, alias)
        if value > limit:
            self.fault(name, f"= {value:.3e} is beyond {limit}, which no checkpoint of this family has")
            return 1
        return value

    def must_be(self, **supported: Any) -> None:
        """Faults every field given another value than the one that the model has."""
        for name, expected in supported.items():
            self.used.add(name)
            value = self.raw.get(name)
            if value is not None and value != expected:
                self.fault(name, f"= {value!r:.60} is not supported: {self.family} has {expected!r}")

    def indices(self, name: str, n: int) -> list[int] | None:
        """A list of indices of `n` layers, or None when absent."""
        value = self.field(name, list)
        if value is None:
            return None
        if bad := [i for i in value if type(i) is not int or not 0 <= i < n]:
            self.fault(name, f"names layers {bad!r:.60} outside 0..{n - 1}")
            return [i for i in value if i not in bad]
        return value

    def strings(self, name: str) -> list[str] | None:
        """A list of strings, or None when absent."""
        value = self.field(name, list)
        if value is not None and not all(isinstance(item, str) for item in value):
            self.fault(name, f"must be a list of strings, not {value!r:.60}")
            return None
        return value

    def token_ids(self, name: str, vocab_size: int) -> tuple[int, ...]:
        """A field that holds one token id, several or none."""
        self.used.add(name)
        value = self.raw.get(name)
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(i) is int and 0 <= i < vocab_size for i in ids):
            self.fault(name, f"must be an id below vocab_size, a list of ids or null, not {value!r:.60}")
            return ()
        return tuple(ids)

    def fault(self, name: str, sentence: str) -> None:
        """Notes what is wrong with a field."""
        self.faults.append(f"{self.prefix}{name} {sentence}")

    def finish(self) -> None:
        """Raises if anything was wrong; otherwise warns of keys that were not read.

        Raises:
            CheckpointError: all faults at once.
        """
        if self.faults:
            raise CheckpointError("config.json cannot be used:\n  " + "\n  ".join(self.faults))
        if unknown := self._unknown():
            log.warning(
                "config.json has keys that %s does not know and that are ignored: %s", self.family, ", ".join(unknown)
            )

    def _unknown(self) -> list[str]:
        own = [self.prefix + key for key in sorted(set(self.raw) - self.used)]
        return own + [key for block in self.blocks for key in block._unknown()]
