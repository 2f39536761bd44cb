"""Values that may be shown to others."""

from __future__ import annotations

import os
import re
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
    cleaned: dict[str, Any] = _clean(config.model_dump(mode="json"), by_name=False)
    cleaned["environment"] = _clean(cleaned["environment"], by_name=True)
    return cleaned


def without_paths(value: Any) -> Any:
    """JSON-like values with the last part of each absolute path: the folders of this machine mean nothing elsewhere."""
    if isinstance(value, dict):
        return {key: without_paths(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_paths(item) for item in value]
    return Path(value).name if isinstance(value, str) and os.path.isabs(value) else value


def _clean(value: Any, *, by_name: bool) -> Any:
    if isinstance(value, dict):
        return {
            key: REMOVED if by_name and _is_secret(key, item) else _clean(item, by_name=by_name)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_clean(item, by_name=by_name) for item in value]
    return _QUERY.sub(rf"\1{REMOVED}", _LOGIN.sub("", value)) if isinstance(value, str) else value


def _is_secret(name: str, value: Any) -> bool:
    words = _WORD.findall(name)
    last = words[-1].lower() if words else ""
    if value is None or (last.endswith("s") and isinstance(value, (int, float))):
        return False
    return last in _SECRET or last.removesuffix("s") in _SECRET
