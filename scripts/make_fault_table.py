"""Put what `make faults` measured into docs/reliability.md, between its two marks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- faults: begin -->", "<!-- faults: end -->"
HEADER = (
    "| case | faults | launcher | detection, s | restart, s | longest, s | first step, s | lost | bitwise |",
    "|---|---|---|---|---|---|---|---|---|",
)


def table(rows: list[dict[str, Any]]) -> str:
    """The rows of ``outputs/faults.jsonl`` as Markdown; of a case that was run twice the later one."""
    latest = {row["case"]: row for row in rows}
    return "\n".join((*HEADER, *(_line(row) for row in latest.values())))


def _line(row: dict[str, Any]) -> str:
    cells = [row["case"], row["faults"], row["launcher"]]
    cells += [_seconds(row[name]) for name in ("detection", "restart", "longest_restart", "first_step")]
    cells += [row["lost"], "yes" if row["bitwise"] else "no"]
    return "| " + " | ".join(map(str, cells)) + " |"


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def main() -> int:
    """Rewrite the page from a file of results."""
    source = Path(sys.argv[1]) if sys.argv[1:] else ROOT / "outputs" / "faults.jsonl"
    rows = [json.loads(line) for line in source.read_text(encoding="utf-8").splitlines()]
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    PAGE.write_text(f"{before}{BEGIN}\n{table(rows)}\n{END}{after}", encoding="utf-8")
    print(f"{len(rows)} rows in {PAGE.relative_to(ROOT)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
