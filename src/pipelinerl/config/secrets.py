"""Values that may be shown to others, and changes of all texts in values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.config.schema import RunConfig

REMOVED = "(removed)"
_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_SECRET = {"key", "apikey", "token", "secret", "password", "passwd", "passphrase", "credential", "authorization"}
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")
_QUERY = re.compile(r"([?&][^=&\s]*(?:key|token|secret|passw(?:or)?d|signature)=)[^&#\s]+", re.IGNORECASE)


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON-like values, without secrets in addresses, and in `environment` by the names of keys.

    A name whose last word is a secret's (`api_key`, `accessToken`, `passwords`) has its value removed, whatever it is: only
    numbers under a plural stay, because they are counts (`max_tokens`).
    """
    cleaned = with_texts(lambda text: _QUERY.sub(rf"\1{REMOVED}", _LOGIN.sub("", text)), config.model_dump(mode="json"))
    return {**cleaned, "environment": _without_named(cleaned["environment"])}


def without_paths(value: Any) -> Any:
    """JSON-like values with the last part of each absolute path: the folders of this machine mean nothing elsewhere."""
    return with_texts(lambda text: Path(text).name if os.path.isabs(text) else text, value)


def _without_named(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: REMOVED if _is_secret(key, item) else _without_named(item) for key, item in value.items()}
    return [_without_named(item) for item in value] if isinstance(value, list) else value


def _is_secret(name: str, value: Any) -> bool:
    words = _WORD.findall(name)
    last = words[-1].lower() if words else ""
    if value is None or (last.endswith("s") and isinstance(value, (int, float))):
        return False
    return last in _SECRET or last.removesuffix("s") in _SECRET


def with_texts(change: Callable[[str], str], value: Any) -> Any:
    """The same JSON-like values with `change` of each text that is a value."""
    if isinstance(value, dict):
        return {key: with_texts(change, item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [with_texts(change, item) for item in value]
    return change(value) if isinstance(value, str) else value
