"""Print the tables of all results as Markdown, for docs/benchmarks.md.

python -m benchmarks.summarize > tables.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks import common


def section(path: Path) -> str:
    """The table of one result under its name, with its machine."""
    result = json.loads(path.read_text())
    machine, settings = result["machine"], result["settings"]
    repetitions = settings.get("repetitions", "?")
    where = (
        f"{machine['date']}, {machine['cpu']}, {machine['cores']} cores, torch {machine['torch']}, transformers "
        f"{machine['transformers']}; {repetitions} repetitions, medians; load average {machine['load_average'][0]} at the "
        f"start, {result['ended']['load_average'][0]} at the end."
    )
    return f"### {result['name']}\n\n{common.markdown(result['table'])}\n\n{where}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=common.RESULTS)
    options = parser.parse_args()
    print("\n".join(section(path) for path in sorted(options.results.glob("*.json"))))


if __name__ == "__main__":
    main()
