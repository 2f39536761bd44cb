"""The keys of the run file, from the JSON schema that pydantic makes of `schema.py`; `help` has what is said about them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic import BaseModel

from pipelinerl.config.schema import RunConfig

EXTENDS = "extends"
"""The key of a run file that names another one. No configuration has it: `load` puts the two together."""


@dataclass(frozen=True)
class Key:
    """One key that takes a value. `section` is "" at the top level; `schema` is its JSON schema without references."""

    section: str
    name: str
    schema: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def description(self) -> str:
        return " ".join(self.schema.get("description", "").split())

    @property
    def types(self) -> set[str]:
        """The JSON types that this key takes."""
        return {option["type"] for option in self.schema.get("anyOf", [self.schema])}

    @property
    def inner(self) -> tuple[Key, ...]:
        """The keys of a mapping whose keys are known."""
        options = self.schema.get("anyOf", [self.schema])
        return tuple(Key(str(self), *item) for option in options for item in option.get("properties", {}).items())


@cache
def run_keys() -> dict[str, Key]:
    """Every key of the run file that takes a value, with dots, in the order of the schema."""
    keys = []
    for name, schema in fields_of(RunConfig).items():
        keys += (
            [Key(name, *item) for item in schema["properties"].items()]
            if "properties" in schema
            else [Key("", name, schema)]
        )
    return {str(key): key for key in keys}


def differences(before: Any, now: Any, key: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Each dotted key whose value differs between two JSON-like documents, with both values."""
    if isinstance(before, dict) and isinstance(now, dict):
        for name in dict.fromkeys([*before, *now]):
            yield from differences(before.get(name), now.get(name), f"{key}.{name}" if key else name)
    elif before != now:
        yield key, before, now


@cache
def run_sections() -> tuple[str, ...]:
    return tuple(dict.fromkeys(key.section for key in run_keys().values() if key.section))


def key_of(key: str) -> Key | None:
    """The key that `key` is, or that it lies in (`environment.args.x`, `trainer.betas.0`); None if there is none."""
    keys, parts = run_keys(), key.split(".")
    front = next((keys[name] for name in (".".join(parts[:end]) for end in (1, 2)) if name in keys), None)
    return next((inner for inner in front.inner if f"{key}.".startswith(f"{inner}.")), front) if front else None


def settable(key: str) -> Key | None:
    """The same for a key that can be set, alone or as part of a mapping."""
    found = key_of(key)
    return found if found and all(key.split(".")) and (str(found) == key or "object" in found.types) else None


def show(value: Any) -> str:
    """A value as it is named in a message: short, on one line."""
    text = repr(value) if isinstance(value, str) else spell(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spell(value: Any) -> str:
    """A value the way a run file spells it: null, true, plain text, [lists]; anything else as Python does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else repr(list(value) if isinstance(value, tuple) else value)


def fields_of(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of each field of a model, without references."""
    document = model.model_json_schema()

    def resolved(schema: Any) -> Any:
        if isinstance(schema, list):
            return [resolved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return resolved(document["$defs"][schema["$ref"].removeprefix("#/$defs/")])
        return {name: resolved(item) for name, item in schema.items()}

    return {name: resolved(schema) for name, schema in document.get("properties", {}).items()}
