"""The keys of the run file: what each takes, in words; which one a wrong key means; and a configuration printed with them.

All of it is read from the JSON schema that pydantic makes from `schema.py`, which editors use, too.
"""

from __future__ import annotations

import difflib
import json
import textwrap
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from pydantic.json_schema import GenerateJsonSchema

from pipelinerl.config import yaml_text
from pipelinerl.config.schema import RunConfig

WIDTH = 100
_WORDS = {
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "null": "null",
    "object": "a mapping",
    "string": "text",
}
_BOUNDS = {"exclusiveMinimum": ">", "minimum": ">=", "exclusiveMaximum": "<", "maximum": "<="}

_SYNONYMS = {
    "run_dir": "output_dir",
    "model.path": "model model_id model_name model_name_or_path",
    "model.dtype": "torch_dtype",
    "model.lora": "peft_config",
    "environment.kind": "env",
    "environment.args": "env_arg reward_funcs dataset train_dataset",
    "schedule.max_lag": "max_staleness max_async_level max_off_policy_steps",
    "actor.group_size": "n num_generations rollouts_per_example",
    "actor.max_tokens": "max_completion_length max_completion_tokens max_new_tokens max_response_length response_length",
    "engine.urls": "engine_url",
    "engine.slots": "max_num_seqs",
    "engine.max_length": "max_model_len max_prompt_length max_seq_len max_seq_length",
    "preprocess.normalize_std": "scale_rewards",
    "preprocess.overlong": "mask_truncated_completions",
    "trainer.steps": "epochs num_epochs num_train_epochs total_epochs max_steps total_training_steps",
    "trainer.batch_size": "train_batch_size rollout_batch_size per_device_train_batch_size",
    "trainer.loss": "loss_type",
    "trainer.loss_normalization": "loss_agg_mode",
    "trainer.clip_low": "clip_ratio_low epsilon",
    "trainer.clip_high": "clip_ratio clip_ratio_high epsilon_high",
    "trainer.kl_coefficient": "beta kl_coef kl_loss_coef",
    "trainer.learning_rate": "lr",
    "trainer.lr_schedule": "lr_scheduler lr_scheduler_type",
    "trainer.warmup_steps": "num_warmup_steps warmup_ratio",
    "trainer.micro_batch_tokens": "max_token_len_per_gpu",
    "trainer.checkpoint_every": "save_steps save_freq",
    "trainer.keep_checkpoints": "save_total_limit",
    "evaluation.every": "eval_steps test_freq",
    "metrics.tensorboard": "report_to",
}
SYNONYMS = {name: key for key, names in _SYNONYMS.items() for name in names.split()}
"""What other libraries (TRL, verl, prime-rl, transformers, vLLM) call a setting -> the key of the run file."""

MOVED = {"trainer.clamp": "`{prefix}correction.token_high` (with `correction.token: truncate`, the default of reinforce)"}
"""Keys of earlier versions and where to set the same thing now."""


@dataclass(frozen=True)
class Key:
    """One key that takes a value. `section` is "" at the top level; `schema` is its JSON schema without references."""

    section: str
    name: str
    schema: dict[str, Any]

    def __str__(self) -> str:
        return f"{self.section}.{self.name}" if self.section else self.name

    @property
    def allowed(self) -> str:
        """What values this key takes, in words."""
        return _in_words(self.schema)

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
    return {str(key): key for key in _keys()}


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


def closest_key(key: str, *, sections: bool = False, among: Collection[str] | None = None) -> str | None:
    """The existing key that someone who wrote `key` most likely meant, if there is one; with `sections`, or section."""
    keys = list(run_keys()) if among is None else [known for known in run_keys() if known in among]
    name = key.rpartition(".")[2].replace("-", "_")
    if sections and "." not in key and (near := difflib.get_close_matches(name, run_sections(), n=1, cutoff=0.75)):
        return near[0]
    if SYNONYMS.get(name) in keys:
        return SYNONYMS[name]
    by_name = {known.rpartition(".")[2]: known for known in keys}
    if name in by_name:
        misplaced = [known for known in keys if known.rpartition(".")[2] == name]
        return max(misplaced, key=lambda known: difflib.SequenceMatcher(None, key, known).ratio())
    if near := difflib.get_close_matches(key.replace("-", "_"), keys, n=1, cutoff=0.6):
        return near[0]
    near = difflib.get_close_matches(name, by_name, n=1, cutoff=0.6)
    return by_name[near[0]] if near else None


def show(value: Any) -> str:
    """A value as it is named in a message: short, on one line."""
    text = repr(value) if isinstance(value, str) else spell(value)
    return text if len(text) <= 60 else text[:57] + "..."


def spell(value: Any) -> str:
    """A value the way a run file spells it: null, true, plain text, [lists]; anything else as Python does."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return value if isinstance(value, str) else repr(list(value) if isinstance(value, tuple) else value)


def config_to_yaml(config: RunConfig) -> str:
    """Every key and its value. `load.config_from_yaml` reads back an equal configuration."""
    return yaml_text.dump(config.model_dump(mode="json"))


def render(config: RunConfig) -> str:
    """The same, with each key's documentation, allowed values and default above it: itself a complete run file."""
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
    return json.dumps({"$schema": GenerateJsonSchema.schema_dialect, **RunConfig.model_json_schema()}, indent=2) + "\n"


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
    return f"Takes {key.allowed}. Default: {spell(key.schema['default'])}"


def _keys() -> Iterator[Key]:
    document = RunConfig.model_json_schema()
    definitions = document["$defs"]

    def resolved(schema: Any) -> Any:
        if isinstance(schema, list):
            return [resolved(item) for item in schema]
        if not isinstance(schema, dict):
            return schema
        if "$ref" in schema:
            return resolved(definitions[schema["$ref"].removeprefix("#/$defs/")])
        return {name: resolved(item) for name, item in schema.items()}

    for name, schema in document["properties"].items():
        if "$ref" in schema:
            yield from (Key(name, *item) for item in resolved(schema)["properties"].items())
        else:
            yield Key("", name, resolved(schema))


def _in_words(schema: dict[str, Any]) -> str:
    match schema:
        case {"anyOf": options}:
            text = " or ".join(map(_in_words, options))
        case {"enum": values} | {"examples": values}:
            text = "one of " + ", ".join(values)
        case {"const": value}:
            text = str(value)
        case {"prefixItems": items}:
            text = f"a list of {len(items)}: " + ", ".join(map(_in_words, items))
        case {"items": item}:
            length = f"{schema['minItems']} or more" if "minItems" in schema else "any length"
            text = f"a list of {length}: {_in_words(item)}"
        case {"properties": inner}:
            text = f"a mapping of {', '.join(inner)}"
        case _:
            limits = [f"{sign} {schema[bound]:g}" for bound, sign in _BOUNDS.items() if bound in schema]
            text = f"{_WORDS[schema['type']]} {' and '.join(limits)}".rstrip()
    return text
