"""What an optional dependency lacks is said in one way; versions are those of pyproject.toml, and have hashes."""

from __future__ import annotations

import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

from pipelinerl import extras
from pipelinerl.errors import MissingDependencyError
from pipelinerl.experiments.doctor import packages, shown

ROOT = Path(__file__).parents[2]
EXTRAS: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
REQUIRES = [
    "torch>=2",
    'starlette>=1.0; extra == "serve"',
    'uvicorn>=0.40; extra == "serve"',
    'verifiers<0.4,>=0.3.1; extra == "verifiers"',
    'pipelinerl[serve]; extra == "ui"',
    'rows>=8; extra == "ui"',
    'hypothesis; extra == "dev"',
]
INSTALLED = {"torch": "2.13.0+cpu", "uvicorn": "0.41", "verifiers": "0.4.0", "starlette": "1.3"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The installed versions, to be changed; this package requires `REQUIRES`."""
    versions = dict(INSTALLED)
    monkeypatch.setattr(extras, "version", versions.get)
    monkeypatch.setattr(metadata, "requires", lambda _: REQUIRES)
    names = list(dict.fromkeys(re.findall('extra == "(.*)"', "\n".join(REQUIRES))))
    monkeypatch.setattr(extras, "names", lambda: [name for name in names if name not in extras._OTHER])
    return versions


def test_what_is_missing_is_named_with_a_command_for_this_environment(
    installed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    extras.require("serve", "serving")
    del installed["starlette"]
    with pytest.raises(MissingDependencyError) as error:
        extras.require("serve", "serving", "; or do without")
    pip = f"{sys.executable} -m pip install"
    assert str(error.value) == f"serving: starlette is not installed: {pip} 'starlette>=1.0'; or do without"
    del installed["uvicorn"]
    with pytest.raises(MissingDependencyError, match=r"pip install 'rows>=8' 'starlette>=1.0' 'uvicorn>=0.40'"):
        extras.require("ui", "the interface")
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(MissingDependencyError, match=r"uv pip install .starlette>=1.0. .uvicorn>=0.40. --python "):
        extras.require("serve", "serving")


def test_a_version_that_does_not_fit_is_named_here_and_by_the_doctor(installed: dict[str, str]) -> None:
    with pytest.raises(MissingDependencyError, match=r"verifiers 0.4.0 is installed, and this needs <0.4,>=0.3.1: .*pip"):
        extras.require("verifiers", "environment.kind verifiers")
    found = {one.what: one for one in packages()}
    assert (found["extra verifiers"].level, found["extras"].found) == ("WRONG", "serve")
    del installed["starlette"], installed["verifiers"]
    installed["torch"] = "1.0"
    found = {one.what: one for one in packages()}
    assert found["other extras"].found == "not installed: serve, verifiers"
    assert (found["torch"].level, "packages" in found, found["extras"].found) == ("WRONG", False, "none")
    assert shown([found["torch"], found["other extras"]]).endswith("1 thing wrong: torch\n")


def test_all_has_every_extra_for_users() -> None:
    (everything,) = EXTRAS["all"]
    named = set(re.findall(r"[\w-]+", everything)) - {"pipelinerl"}
    assert named == set(EXTRAS) - extras._OTHER
    assert EXTRAS["ui"] == ["pipelinerl[serve,pandas]"]


def pins(text: str) -> set[str]:
    """Packages with their versions, as registries compare names (PEP 503)."""
    return {re.sub(r"[-_.]+", "-", pin).lower() for pin in re.findall(r"^[\w.-]+==[^\s;]+", text, re.MULTILINE)}


def test_the_lock_file_has_all_pins_and_hashes_for_each() -> None:
    """`make lock` writes it."""
    lock = (ROOT / "requirements.lock").read_text()
    assert pins((ROOT / "constraints.txt").read_text()) <= pins(lock), "run `make lock`"
    for entry in re.split(r"^(?=\w)", lock, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\s*$", entry), f"{entry.splitlines()[0]} has no hash"
