"""python -m tests.tools.families: writes the table of model families into docs/bring-your-model.md."""

from __future__ import annotations

from model.families.registry import MODELS
from tests.support import ROOT

PAGE = ROOT / "docs/bring-your-model.md"
_HEAD = "| you have | `model_type` | what to do |\n|---|---|---|\n"
_REST = "| nanoGPT,"


def with_table(page: str) -> str:
    """The page with a row for each family, before the rows of what needs a conversion."""
    rows = [
        f"| {models} | `{name}` | serve the directory or the name of the Hub as it is |\n"
        for name, models in MODELS.items()
    ]
    before, _, after = page.partition(_HEAD)
    assert _REST in after, "the page has lost its table"
    return f"{before}{_HEAD}{''.join(rows)}{after[after.index(_REST) :]}"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
