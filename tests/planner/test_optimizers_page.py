"""The page on optimizers shows what the records say."""

from __future__ import annotations

from benchmarks.optim.docs import DOCS, with_table


def test_the_table_is_that_of_the_records() -> None:
    text = DOCS.read_text(encoding="utf8")
    assert "| adamw |" in text
    assert with_table(text) == text, "run python -m benchmarks.optim.docs"
    assert with_table(text.replace("| adamw |", "| adamv |")) == text
