"""`inkstream` and `python -m inkstream`: the verbs of app.__main__, wherever app is installed.

A wheel has app, model and weights in this folder, because other packages named `app` or `model` would overwrite them
in site-packages. In a checkout, which may be an editable installation, they are beside this folder. The folder that
holds them goes first on the module path, so imports are the same in both, and no other package is imported instead.
Child processes get it by PYTHONPATH.
"""

from __future__ import annotations

import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT = _HERE if (_HERE / "app").is_dir() else _HERE.parent
"""The folder that holds app and model."""


def main() -> int:
    """Exit codes: those of app.__main__.main()."""
    sys.path.insert(0, str(ROOT))
    from app.__main__ import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
