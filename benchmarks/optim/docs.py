"""Writes the table of `docs/optimizers.md` from the optimizers' records.

python -m benchmarks.optim.docs
"""

from __future__ import annotations

from pathlib import Path

from trainwright.optim import table

DOCS = Path(__file__).parent.parent.parent / "docs" / "optimizers.md"
START, END = "<!-- table -->\n", "<!-- end of table -->"


def as_markdown() -> str:
    """Return the table of all optimizers."""
    rows = table()
    lines = [list(rows[0]), ["---"] * len(rows[0]), *([row[key] for key in rows[0]] for row in rows)]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def with_table(text: str) -> str:
    """Return the page with its table made anew."""
    before, rest = text.split(START)
    return before + START + as_markdown() + END + rest.split(END)[1]


if __name__ == "__main__":
    DOCS.write_text(with_table(DOCS.read_text(encoding="utf8")), encoding="utf8")
