"""Gives the build its version, and writes it into the wheel; pyproject.toml has everything else."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py

sys.path.insert(0, str(Path(__file__).resolve().parent))
from inkstream.build_version import build_version


class BuildPy(build_py):
    """Starts from nothing: setuptools would keep files of an earlier build that are newer, or gone from the sources."""

    def run(self) -> None:
        """Copies the modules, and fills in BUILT_VERSION in their copy of app/common/version.py."""
        if self.editable_mode:
            super().run()
            return
        package = Path(self.build_lib) / "inkstream"
        shutil.rmtree(package, ignore_errors=True)
        super().run()
        path, line = package / "app/common/version.py", f'BUILT_VERSION = "{self.distribution.get_version()}"'
        text, count = re.subn(r'^BUILT_VERSION = ""$', line, path.read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert count == 1, path
        path.write_text(text, encoding="utf-8")


setup(version=build_version(), cmdclass={"build_py": BuildPy})
