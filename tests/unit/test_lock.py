"""`requirements.lock` has the versions of `constraints.txt`, each with hashes (`make lock`)."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def named(name: str) -> str:
    """A package's name as registries compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def test_the_lock_file_has_all_pins_and_hashes_for_each() -> None:
    pinned = {}
    for line in (ROOT / "constraints.txt").read_text().splitlines():
        if line and not line.startswith("#"):
            name, _, version = line.partition("==")
            pinned[named(name)] = version
    entries = re.split(r"^(?=\w)", (ROOT / "requirements.lock").read_text(), flags=re.MULTILINE)[1:]
    locked = {}
    for entry in entries:
        found = re.match(r"([\w.-]+)==([^\s;]+)", entry)
        assert found is not None, entry
        locked[named(found[1])] = found[2]
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\s*$", entry), f"{found[1]} has no hash"
    assert pinned.items() <= locked.items(), "run `make lock`"
