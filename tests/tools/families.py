"""python -m tests.tools.families: writes what documentation and tests derive from the list of model families.

These are the table in docs/bring-your-model.md, and cache and contexts of the models in published.json.
"""

from __future__ import annotations

import json

from app.cli.check import describe_contexts
from model.families.registry import MODELS, read_config
from tests.support import ROOT

PAGE = ROOT / "docs/bring-your-model.md"
PUBLISHED = ROOT / "tests/model/families/published.json"
_HEAD = "| you have | `model_type` | what to do |\n|---|---|---|\n"
_REST = "| nanoGPT,"
_SERVE = "serve the directory or the name of the Hub as it is"


def with_table(page: str) -> str:
    """The page with a row for each family, before the rows of what needs a conversion."""
    rows = [f"| {models} | `{name}` | {_SERVE} |\n" for name, models in MODELS.items()]
    before, _, after = page.partition(_HEAD)
    assert _REST in after, "the page has lost its table"
    return f"{before}{_HEAD}{''.join(rows)}{after[after.index(_REST) :]}"


def with_contexts(published: str) -> str:
    """The models with `kib_per_token` and `contexts`, which follow from `config` and `parameters`."""
    models = json.loads(published)
    for name, model in models["read"].items():
        config = read_config(model["config"])[1]
        models["read"][name] = {
            "parameters": model["parameters"],
            "kib_per_token": 2 * config.kv_elements_per_token / 1024,
            "contexts": describe_contexts(config, model["parameters"]).partition(" of free memory")[0],
            "config": model["config"],
        }
    return json.dumps(models, indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text()))
    PUBLISHED.write_text(with_contexts(PUBLISHED.read_text()))
