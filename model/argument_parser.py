"""Argument parser that reports an error in one line."""

from __future__ import annotations

import argparse
from typing import NoReturn

from model.files import one_line


class OneLineParser(argparse.ArgumentParser):
    """argparse prints its usage, a dozen lines for some verbs, before it says what is wrong."""

    def error(self, message: str) -> NoReturn:
        """One line, and exit code 2."""
        self.exit(2, one_line(f"error: {message}; {self.prog} --help tells how it is called") + "\n")
