"""A configuration that may be shown to others."""

from __future__ import annotations

import re
from typing import Any

from pipelinerl.config.schema import RunConfig

REMOVED = "(removed)"
_SECRET_NAME = re.compile(r"(^|[_-])(api[_-]?key|key|token|secret|passw(or)?d|credentials?|authorization)$", re.IGNORECASE)
_LOGIN = re.compile(r"(?<=://)[^/@\s]+@")


def without_secrets(config: RunConfig) -> dict[str, Any]:
    """The configuration as JSON-like values, without passwords in addresses and without texts whose key names a secret."""
    cleaned: dict[str, Any] = _clean(config.model_dump(mode="json"))
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            key: REMOVED if isinstance(item, str) and _SECRET_NAME.search(key) else _clean(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_clean(item) for item in value]
    return _LOGIN.sub("", value) if isinstance(value, str) else value
