"""Environment variables in run files: `${NAME}` in a text stands for the variable's value, `$${NAME}` for `${NAME}`.

`${NAME:-TEXT}` stands for TEXT if the variable is not set, or empty.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any

from pipelinerl.config import yaml_text
from pipelinerl.config.keys import settable
from pipelinerl.errors import ConfigError

_REFERENCE = re.compile(r"(\$?)\$\{([A-Za-z_]\w*)(?::-([^}]*))?\}")


def resolved(value: Any, origins: Mapping[str, str], place: str = "") -> Any:
    """The values of a run file without references. Raises ConfigError for a variable that is not set.

    A value that is one reference gets the type that the variable's text would have in the file. `origins`: where keys are.
    """
    if isinstance(value, dict):
        return {key: resolved(item, origins, f"{place}.{key}" if place else str(key)) for key, item in value.items()}
    if isinstance(value, list):
        return [resolved(item, origins, f"{place}.{number}") for number, item in enumerate(value)]
    if not isinstance(value, str):
        return value

    known = place
    while known not in origins and "." in known:
        known = known.rpartition(".")[0]
    origin = origins.get(known, place)

    def replacement(reference: re.Match[str]) -> str:
        escape, name, default = reference.groups()
        if escape:
            return reference[0].removeprefix("$")
        if default is not None:
            return os.environ.get(name) or str(default)
        if name not in os.environ:
            raise ConfigError(
                f"{origin}: the environment variable {name} is not set; set it, or write $${{{name}}} if the text "
                f"${{{name}}} is meant"
            )
        return os.environ[name]

    text = _REFERENCE.sub(replacement, value)
    whole, key = _REFERENCE.fullmatch(value), settable(place)
    only_text = key is not None and str(key) == place and key.types <= {"string", "null"}
    return yaml_text.parse(text, origin).value if whole and not whole[1] and not only_text else text


def escaped(value: Any) -> Any:
    """The same values with `$${NAME}` for `${NAME}`, as a run file has to have them."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    return _REFERENCE.sub(r"$\g<0>", value) if isinstance(value, str) else value
