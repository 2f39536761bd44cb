"""What tests share: property tests draw the same examples every time (to explore: --hypothesis-profile=wild)."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("seeded", derandomize=True)
settings.register_profile("wild", derandomize=False, max_examples=1000)
settings.load_profile("seeded")
