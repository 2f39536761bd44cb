"""A configuration as YAML text: plain, for the run directory, or with the documentation of every key, for people."""

from __future__ import annotations

import textwrap
from typing import Any

import msgspec

from pipelinerl.config import yaml_text
from pipelinerl.config.fields import Field, run_fields, spell
from pipelinerl.config.schema import RunConfig

WIDTH = 100


def config_to_yaml(config: RunConfig) -> str:
    """Every key and its value. `load.config_from_yaml` reads back an equal configuration."""
    return yaml_text.dump(msgspec.to_builtins(config))


def render(config: RunConfig) -> str:
    """The same, with each key's documentation, allowed values and default above it: itself a complete run file."""
    values = msgspec.to_builtins(config)
    blocks: list[str] = []
    section = ""
    for field in run_fields().values():
        head = ""
        if field.section != section:
            section = field.section
            head = f"{section}:\n"
        value = values[section][field.name] if section else values[field.name]
        blocks.append(head + textwrap.indent(_documented(field, value), "  " if section else ""))
    return "\n".join(blocks)


def _documented(field: Field, value: Any) -> str:
    indent = 2 if field.section else 0
    wrap = textwrap.TextWrapper(
        WIDTH - indent, initial_indent="# ", subsequent_indent="# ", break_long_words=False, break_on_hyphens=False
    )
    lines = [*wrap.wrap(field.description), *wrap.wrap(_values(field))]
    wrap.subsequent_indent += "  "
    lines += [line for inner in field.inner for line in wrap.wrap(f"- {inner.name}: {inner.description} {_values(inner)}")]
    return "\n".join(lines) + "\n" + yaml_text.dump({field.name: value})


def _values(field: Field) -> str:
    return f"Takes {field.allowed}. Default: {spell(msgspec.to_builtins(field.default))}"
