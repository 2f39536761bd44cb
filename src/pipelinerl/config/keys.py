"""The keys of the run file, from the JSON schema that pydantic makes of `schema.py`.

What each takes, in words; what is wrong with a key or value; and the documented run file.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema
from pydantic_core import ErrorDetails

from pipelinerl.config import yaml_text
from pipelinerl.config.schema import RunConfig

EXTENDS = "extends"
"""The key of a run file that names another one. No configuration has it: `load` puts the two together."""
WIDTH = 100
LIKE = 0.75
"""How alike a name and a key must be, at least, to be taken for a slip of the pen."""
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping",
    "string": "text",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

_ALL_KEYS = "`pipelinerl config` prints all keys; docs/coming_from.md has the names that other libraries give them"
_ONLY_HERE = "the page is only for this machine; from another one: `ssh -L 7117:127.0.0.1:7117 MACHINE`"
OLD_NAMES = {
    "actor.code_timeout_s": "code that never returns now ends a run after `{prefix}launch.watchdog_s`: remove it",
    "trainer.clamp": "it is now `{prefix}correction.token_high`, with `correction.token: truncate`",
    "launch.lost_s": "Ray's health checks decide this now: remove it",
    "evaluation.accept_trained": "a resume warns of such problems now: remove it",
    "weights.full_every": "not needed, because every receiver verifies all weights: remove it",
    "trainer.backend": "ranks use nccl between GPUs and gloo between CPUs: remove it",
    "metrics.verbose": "the table at the end always has all rows: remove it",
    "trainer.keep_versions": "it is now `{prefix}trainer.weights_every`: 1 keeps every version",
    "metrics.tensorboard": "it is now `{prefix}metrics.trackers`, as `[tensorboard]`",
    **dict.fromkeys(("resume", "continue"), "train --resume RUN_DIR"),
    **dict.fromkeys(("run", "start"), "train RUN.yaml` or `train --resume RUN_DIR"),
    "convert-gguf": "python scripts/convert_gguf.py",
    **{name: f"lab {name}" for name in ("compare", "study", "plan", "calibrate", "simulate")},
    **dict.fromkeys(("export", "lab export"), "tar --exclude=control --exclude=logs --exclude=streams -cf OUT.tar RUN_DIR"),
    **dict.fromkeys(("watch --host", "watch --api-key-env"), _ONLY_HERE),
    "train --verbose": "the table at the end always has all rows",
    "browse --evaluations": "read rollouts/evaluation-*.jsonl of the run, which have one row per answer",
    "browse --export": "`pipelinerl.Run(RUN_DIR).rollouts`, in Python, is a data frame with a row per rollout",
}
"""Keys, commands and flags of earlier versions, and commands that users try first -> what to write now."""


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


# ---- a wrong key or value


class KeyMistake(NamedTuple):
    """What is wrong with the value at `place`, which lies in `key` if its place alone may not be known."""

    place: str
    text: str
    key: Key | None = None


def explain(error: ErrorDetails, given: Callable[[str], Any]) -> KeyMistake:
    """A mistake that pydantic found, in one line. `given(key)` is the value of a key in the run file."""
    kind, value, place = error["type"], error["input"], ".".join(map(str, error["loc"]))
    if kind == "extra_forbidden":
        return KeyMistake(place, _unknown_in_file(place))
    if place in run_sections():
        example = next(key.name for key in run_keys().values() if key.section == place)
        hint = f", as in `{place}: {{{example}: {show(value)}}}`" if isinstance(value, str) else ""
        return KeyMistake(place, f"this is a section; its keys go below it, indented{hint}")
    key = key_of(place)
    if "recursion" in kind:
        text = "nested too deeply, or a value that contains itself"
    elif kind == "invalid_key" or error["loc"][-1] == "[key]":
        text = f"the key {show(value)} is not text; put it in quotes"
    elif kind == "finite_number":
        text = f"{value} is not a finite number"
    elif kind == "invalid-json-value" or key is None:
        text = f"a value of type {type(value).__name__} can't be written as JSON"
    else:
        place, text = str(key), f"{show(given(str(key)))} is not allowed here; this takes {in_words(key.schema)}"
    return KeyMistake(place, text, key)


def explain_argument(options: type[BaseModel], found: Sequence[ErrorDetails], args: Mapping[str, Any]) -> str:
    """The first mistake that pydantic found in `environment.args`, in words that follow this name."""
    keys = fields_of(options)
    error = min(found, key=lambda one: one["type"] != "extra_forbidden")  # it may be another one's name
    name, *inner = map(str, error["loc"])
    if name not in keys:
        close = difflib.get_close_matches(name, keys, n=1)
        listed = ", ".join(one if "default" in schema else f"{one} (required)" for one, schema in keys.items())
        return f".{name}: unknown; " + (f"did you mean `{close[0]}`?" if close else f"it takes {listed or 'nothing'}")
    takes = f"this takes {in_words(keys[name])}"
    if name not in args:
        return f".{name}: it is missing; {takes}"
    where = f" (at {'.'.join(inner)}: {error['msg']})" if inner and isinstance(args[name], dict | list) else ""
    return f".{name}: {show(args[name])} is not allowed here; {takes}{where}"


def _unknown_in_file(key: str) -> str:
    """What is wrong with a key that a run file has and must not have there."""
    if key in run_keys():
        section, _, name = key.partition(".")
        return f"in a run file this is `{name}` below `{section}:`, indented"
    if (mapping := settable(key)) is None:
        return unknown_key(key, sections=True)
    return f"unknown key; this takes {in_words(mapping.schema)}" if mapping.inner else f"write `{mapping}` as a mapping"


def unknown_key(key: str, prefix: str = "", *, sections: bool = False, keys: Collection[str] | None = None) -> str:
    """What is wrong with a key that does not exist, with the key that is most likely meant.

    `keys`: the only ones that may be meant; with `sections`, or a section.
    """
    if "." in key and key in OLD_NAMES:
        return f"unknown key; {OLD_NAMES[key].format(prefix=prefix)}"
    among = list(run_keys()) if keys is None else [known for known in run_keys() if known in keys]
    name = key.rpartition(".")[2].replace("-", "_")
    by_name = {known.rpartition(".")[2]: known for known in among}
    like = partial(difflib.get_close_matches, n=1, cutoff=LIKE)
    if sections and "." not in key and (near := like(name, run_sections())):
        found = near[0]
    elif name in by_name:
        misplaced = [known for known in among if known.rpartition(".")[2] == name]
        found = max(misplaced, key=lambda known: difflib.SequenceMatcher(None, key, known).ratio())
    elif near := like(key.replace("-", "_"), among):
        found = near[0]
    elif near := like(name, by_name):
        found = by_name[near[0]]
    else:
        return f"unknown key; {_ALL_KEYS}"
    return f"unknown key; did you mean `{prefix}{found}`?"


# ---- documentation


def render(config: RunConfig) -> str:
    """A complete run file: every key and its value, with its documentation, allowed values and default above it."""
    values = config.model_dump(mode="json")
    blocks: list[str] = []
    section = ""
    for key in run_keys().values():
        head = f"{key.section}:\n" if key.section != section else ""
        section = key.section
        value = values[section][key.name] if section else values[key.name]
        blocks.append(head + textwrap.indent(_documented(key, value), "  " if section else ""))
    return "\n".join(blocks)


def json_schema() -> str:
    """The JSON schema of run files, for editors."""
    schema = RunConfig.model_json_schema()
    described = "A run file, relative to this one, with the keys that this one does not set."
    schema["properties"] = {EXTENDS: {"type": "string", "description": described}, **schema["properties"]}
    return json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **schema}, indent=2) + "\n"


def _documented(key: Key, value: Any) -> str:
    wrap = textwrap.TextWrapper(
        WIDTH - (2 if key.section else 0), initial_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    wrap.subsequent_indent = "# "
    lines = [*wrap.wrap(key.description), *wrap.wrap(_values(key))]
    wrap.subsequent_indent = "#   "
    lines += [line for inner in key.inner for line in wrap.wrap(f"- {inner.name}: {inner.description} {_values(inner)}")]
    return "\n".join(lines) + "\n" + yaml_text.dump({key.name: value})


def _values(key: Key) -> str:
    default = f"Default: {spell(key.schema['default'])}" if "default" in key.schema else "It must be set"
    return f"Takes {in_words(key.schema)}. {default}"


def in_words(schema: dict[str, Any]) -> str:
    """What values a key of this JSON schema takes."""
    match schema:
        case {"anyOf": options}:
            text = " or ".join(map(in_words, options))
        case {"enum": values} | {"examples": values}:
            text = "one of " + ", ".join(values)
        case {"const": value}:
            text = str(value)
        case {"prefixItems": items}:
            text = f"a list of {len(items)}: " + ", ".join(map(in_words, items))
        case {"items": item}:
            length = f"{schema['minItems']} or more" if "minItems" in schema else "any length"
            text = f"a list of {length}: {in_words(item)}"
        case {"properties": inner}:
            text = f"a mapping of {', '.join(inner)}"
        case _:
            limits = [f"of {schema['pattern']}"] if "pattern" in schema else []
            limits += [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
            text = f"{_WORDS[schema['type']]} {' and '.join(limits)}".rstrip()
    return text
