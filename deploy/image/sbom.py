"""Software bill of materials of the image: CycloneDX JSON of Debian's and Python's packages, on standard output.

python3 sbom.py DPKG_STATUS SITE_PACKAGES...; the Dockerfile runs it, so it uses the standard library only.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from email.parser import HeaderParser
from importlib.metadata import distributions
from pathlib import Path
from urllib.parse import quote

_INSTALLED = "install ok installed"


def debian_packages(status: str) -> Iterator[dict[str, str]]:
    """Components of the installed packages in the text of /var/lib/dpkg/status."""
    for paragraph in status.split("\n\n"):
        fields = HeaderParser().parsestr(paragraph)
        if fields["Status"] == _INSTALLED:
            name, version = fields["Package"], fields["Version"]
            query = f"arch={fields['Architecture']}"
            yield _component(name, version, f"pkg:deb/debian/{name}@{quote(version, safe='')}?{query}")


def python_packages(folders: Sequence[str]) -> Iterator[dict[str, str]]:
    """Components of the distributions that are installed in these folders."""
    for found in distributions(path=list(folders)):
        name = found.metadata["Name"].lower().replace("_", "-")
        yield _component(name, found.version, f"pkg:pypi/{name}@{quote(found.version, safe='')}")


def bill_of_materials(components: Sequence[dict[str, str]]) -> dict[str, object]:
    """The document, in a fixed order: the same image gives the same file."""
    ordered = sorted(components, key=lambda component: component["purl"])
    own = [{"version": component["version"]} for component in ordered if component["name"] == "inkstream"]
    version = own[0] if own else {}
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "version": 1,
        "metadata": {"component": {"type": "container", "name": "inkstream", **version}},
        "components": ordered,
    }


def _component(name: str, version: str, purl: str) -> dict[str, str]:
    return {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}


def main(status: str, *folders: str) -> int:
    """Prints the document; returns exit code 0."""
    components = [*debian_packages(Path(status).read_text(encoding="utf-8")), *python_packages(folders)]
    print(json.dumps(bill_of_materials(components), indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
