"""Variables on make's command line that the Makefile does not know: python -m deploy.install --unknown NAME..."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence

from deploy.install.state import ROOT

_OTHERS = re.compile(
    r"(INKSTREAM|OMP|MKL|KMP|CUDA|NVIDIA|NCCL|TORCH|PYTORCH|TRITON|HF|TRANSFORMERS|TOKENIZERS|PIP|UV|PYTHON|PYTEST|HYPOTHESIS"
    r"|XDG|LC|SSL|REQUESTS|SOURCE_DATE)_\w+|[A-Z]*FLAGS|(https?|no|all|HTTPS?|NO|ALL)_(proxy|PROXY)"
    r"|CI|CC|CXX|HOME|LANG|MAKE\w*|NO_COLOR|PATH|SHELL|TERM|TMPDIR|PYTHON(DONTWRITEBYTECODE|UNBUFFERED|PATH|HASHSEED)"
)
"""Variables of other programs: make hands them on, as it does with all of its command line."""


_SYNONYMS = {"MODEL": "WEIGHTS", "FLAGS": "ARGS", "OPTIONS": "ARGS", "WORKERS": "JOBS", "TORCH_INDEX": "PIP_ARGS"}


def known_variables() -> list[str]:
    """Those that the Makefile declares for its users."""
    lines = re.findall(r"^VARIABLES := (.+)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    return sorted(" ".join(lines).split())


def explain_variables(names: Sequence[str]) -> str:
    """An error for the first name that is neither of the Makefile nor of another program; else nothing."""
    known = known_variables()
    for name in (name for name in names if name not in known):
        cutoff = 0.9 if _OTHERS.fullmatch(name) else 0.6
        near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=cutoff)
        if meant := _SYNONYMS.get(name.upper(), "".join(near)):
            return f"{name} is no variable of make; did you mean {meant}=?"
        if not _OTHERS.fullmatch(name):
            return f"{name} is no variable of make: it has {', '.join(known)}; one of the environment: {name}=... make"
    return ""
