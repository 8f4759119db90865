"""One object of a config file, read key by key: what is never read can be refused by name.

Knows no architecture: which keys there are is its reader's concern.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from forge.engines.gemma4.refusal import ConfigRefused, shown_value


class ConfigFields:
    """The keys of one JSON object, each with a check of its kind.

    `where` names the object in messages. A key that is absent gives the default; without one it is
    refused as missing. Every method raises ConfigRefused with the key and its value.
    """

    def __init__(self, where: str, values: Mapping[str, object]) -> None:
        self._where = where
        self._values = values
        self._read: set[str] = set()

    def value(self, key: str) -> object:
        """Whatever stands under `key`; None where it is absent or null."""
        self._read.add(key)
        return self._values.get(key)

    def has(self, key: str) -> bool:
        """Whether `key` is there, be it null."""
        return key in self._values

    def refused(self, key: str, why: str) -> ConfigRefused:
        """A refusal of `key` with its value."""
        stated = shown_value(self._values[key]) if key in self._values else "absent"
        return ConfigRefused(f"{self._where}: {key} = {stated} is not understood: {why}")

    def whole(self, key: str, default: int | None = None, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self._stated(key, default)
        if type(value) is not int or value < least:
            raise self.refused(key, f"it has to be a whole number of at least {least}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A finite number above zero."""
        value = self._stated(key, default)
        if type(value) not in (int, float):
            raise self.refused(key, "it has to be a number")
        number = float(value)  # type: ignore[arg-type]
        if not math.isfinite(number) or number <= 0:
            raise self.refused(key, "it has to be a finite number above zero")
        return number

    def flag(self, key: str, default: bool = False) -> bool:
        """True or false."""
        value = self._stated(key, default)
        if type(value) is not bool:
            raise self.refused(key, "it has to be true or false")
        return value

    def token(self, key: str, default: int | None) -> int | None:
        """A token's id, or None where the file says null."""
        if self.has(key) and self.value(key) is None:
            return None
        if default is None and not self.has(key):
            return None
        return self.whole(key, default, least=0)

    def one_of(self, key: str, allowed: Collection[object], default: object = None) -> object:
        """A value that is among `allowed`."""
        value = self._values.get(key, default)
        self._read.add(key)
        # 0 == False and 1 == True: the kind has to fit as well.
        if not any(type(value) is type(good) and value == good for good in allowed):
            readable = " or ".join(shown_value(good) for good in allowed)
            raise self.refused(key, f"this engine reads {readable} alone")
        return value

    def child(self, key: str) -> ConfigFields:
        """The object under `key`."""
        value = self.value(key)
        if not isinstance(value, dict):
            raise self.refused(key, "it has to be an object")
        return ConfigFields(f"{self._where}.{key}", value)

    def keys(self) -> list[str]:
        """All keys, in the file's order."""
        return list(self._values)

    def refuse_rest(self, harmless: Collection[str]) -> None:
        """Refuse the first key that was neither read nor is harmless. A null sets nothing."""
        for key, value in self._values.items():
            if key not in self._read and key not in harmless and value is not None:
                raise self.refused(key, "nobody knows whether it moves a logit")

    def _stated(self, key: str, default: object) -> object:
        self._read.add(key)
        if key not in self._values and default is None:
            raise ConfigRefused(f"{self._where}: {key} is missing")
        return self._values.get(key, default)
