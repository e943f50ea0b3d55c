"""Settings of TLS and SASL as the user typed them: by their canonical name, for parsing and for messages."""

from __future__ import annotations

from collections.abc import Mapping

from spark_klog.errors import ConfigError

_TRUTH = {"true": True, "false": False}


class Values:
    """The settings among `canonical` (name or other name -> Java's name); `ConfigError` if one is set twice.

    `prefix` is the prefix that the user wrote before the names.
    """

    def __init__(self, settings: Mapping[str, str], prefix: str, canonical: Mapping[str, str]) -> None:
        self.prefix = prefix
        self._typed: dict[str, str] = {}
        self.given: dict[str, str] = {}
        for name, value in settings.items():
            known = canonical.get(name)
            if known is None:
                continue
            if known in self.given:
                raise ConfigError(f"{self.shown(known)} and {prefix}{name} are the same setting: remove one of them")
            self._typed[known], self.given[known] = name, value

    def shown(self, name: str) -> str:
        """A setting's name as the user typed it."""
        return self.prefix + self._typed.get(name, name)

    def text(self, name: str) -> str:
        return self.given.get(name, "").strip()

    def truth(self, name: str, default: bool) -> bool:
        text = self.text(name).lower() or str(default).lower()
        if text not in _TRUTH:
            raise ConfigError(f"{self.shown(name)}={text}: set true or false")
        return _TRUTH[text]

    def choice(self, name: str, choices: tuple[str, ...], default: str) -> str:
        """The one of `choices` that is set, in any case of letters."""
        text = self.text(name).upper() or default
        found = next((choice for choice in choices if choice.upper() == text), None)
        if found is None:
            raise ConfigError(f"{self.shown(name)}={self.text(name)}: set {', '.join(choices[:-1])} or {choices[-1]}")
        return found
