"""`requirements.lock` has the versions of `constraints.txt`, each with hashes (`make lock`)."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def pins(text: str) -> set[str]:
    """Packages with their versions, as registries compare names (PEP 503)."""
    return {re.sub(r"[-_.]+", "-", pin).lower() for pin in re.findall(r"^[\w.-]+==[^\s;]+", text, re.MULTILINE)}


def test_the_lock_file_has_all_pins_and_hashes_for_each() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    assert pins((ROOT / "constraints.txt").read_text()) <= pins(lock), "run `make lock`"
    for entry in re.split(r"^(?=\w)", lock, flags=re.MULTILINE)[1:]:
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\s*$", entry), f"{entry.splitlines()[0]} has no hash"
