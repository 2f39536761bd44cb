"""The optional dependencies: what an extra of this package needs, what is missing, and the command that installs it."""

from __future__ import annotations

import importlib.util
import sys
from importlib import metadata
from typing import TYPE_CHECKING

from pipelinerl.errors import MissingDependencyError

if TYPE_CHECKING:
    from packaging.requirements import Requirement

_OTHER = {"all", "ui", "dev", "docs", "pages"}
"""Extras that combine others, and extras for work on this package."""


def require(extra: str, what: str, hint: str = "") -> None:
    """Raise MissingDependencyError if a package of the extra, which `what` needs, is missing or has another version.

    The message has the command that installs what is needed, and then `hint`.
    """
    if found := lacking(extra):
        raise MissingDependencyError(f"{what}: {', '.join(found.values())}: {install_command(list(found))}{hint}")


def requirements(extra: str = "") -> list[Requirement]:
    """In this package's metadata; without `extra`, what it always needs. Empty for sources that are not installed."""
    from packaging.requirements import Requirement  # noqa: PLC0415 - most processes ask for no extra

    try:
        needed = [Requirement(text) for text in metadata.requires("pipelinerl") or []]
    except metadata.PackageNotFoundError:
        return []
    own = [one for one in needed if str(one.marker or "").partition("extra == ")[2].strip("\"'") == extra]
    nested = [requirements(name) for one in own for name in sorted(one.extras) if one.name == "pipelinerl"]
    return [one for one in own if one.name != "pipelinerl"] + [one for part in nested for one in part]


def names() -> list[str]:
    """The extras that have packages for users of this one. Empty for sources that are not installed."""
    try:
        known = metadata.metadata("pipelinerl").get_all("Provides-Extra", [])
    except metadata.PackageNotFoundError:
        return []
    return [name for name in known if name not in _OTHER]


def lacking(extra: str = "") -> dict[Requirement, str]:
    """The requirements of an extra, or else of this package, that are not met, and why in words."""
    found = {}
    for one in requirements(extra):
        if (here := version(one.name)) is None:
            found[one] = f"{one.name} is not installed"
        elif not one.specifier.contains(here, prereleases=True):
            found[one] = f"{one.name} {here} is installed, and this needs {one.specifier}"
    return found


def version(package: str) -> str | None:
    """The installed version."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def install_command(needed: list[Requirement]) -> str:
    """For the environment of this process, however this package was installed: it names the packages themselves."""
    names = " ".join(f"'{one.name}{one.specifier}'" for one in needed)
    if importlib.util.find_spec("pip"):
        return f"{sys.executable} -m pip install {names}"
    return f"uv pip install {names} --python {sys.executable}"
