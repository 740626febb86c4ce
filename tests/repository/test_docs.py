"""README.md and docs match the code: settings table, tree, fields, and examples, which run as they stand there."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from app.api.native.routes import CompleteRequest
from app.common.settings import grouped_fields
from model.nn.transformer import Decoder
from model.presets import PRESET_NAMES, preset
from tests.support import ROOT
from tests.support.completion_client import whole
from tests.support.nodejs import NODE
from tests.support.servers import Server

README = (ROOT / "README.md").read_text()
CLIENTS = (ROOT / "docs/clients.md").read_text()
API = (ROOT / "docs/api.md").read_text()
SETTINGS = (ROOT / "docs/settings.md").read_text()


def settings_tables() -> str:
    """The tables in docs/settings.md."""
    tables = []
    for title, fields in grouped_fields().items():
        rows = [f"## {title.capitalize()}", "", "| flag | default | meaning |", "|---|---|---|"]
        for name, field in fields.items():
            meaning = " ".join((field.description or "").split())
            rows.append(f"| `--{name.replace('_', '-')}` | {field.default} | {meaning} |")
        tables.append("\n".join(rows))
    return "\n\n".join(tables)


def test_the_settings_tables_are_made_from_the_settings() -> None:
    assert settings_tables() in SETTINGS, settings_tables()


def test_every_path_of_the_tree_exists_and_every_folder_is_in_it() -> None:
    tree = README[README.index("model/            the") : README.index("tests/            mirrors")]
    for line in tree.splitlines():
        name = line.strip().split()[0]
        assert (ROOT / name).exists() or (ROOT / "app" / name).exists(), name
    for path in [p for p in (ROOT / "app").iterdir() if p.is_dir() and p.name != "__pycache__"]:
        assert f"  {path.name}/" in tree, path


def test_every_field_of_a_request_is_explained() -> None:
    for name in CompleteRequest.model_fields:
        assert f"`{name}`" in API, name


def test_the_presets_have_the_sizes_that_are_told() -> None:
    for name in PRESET_NAMES:
        with torch.device("meta"):
            size = Decoder(preset(name)).n_params
        size_text = f"{size / 1e6:.1f} M" if size >= 100_000 else str(size)
        assert re.search(rf"\| `{name}` \|.*\| {size_text} \|", README), name


def _text(server: Server, max_tokens: int) -> str:
    return str(whole(server.url, prompt="Once upon a time", max_tokens=max_tokens, seed=7)["choices"][0]["text"])


@pytest.mark.parametrize(("page", "end"), [(README, "event: done\ndata: {"), (CLIENTS, "data: [DONE]\n\n")])
def test_the_curl_examples_stream(server: Server, page: str, end: str) -> None:
    (command,) = re.findall(r"^curl -N .*$", page, re.MULTILINE)
    command = command.replace("localhost:8000", server.url.removeprefix("http://"))
    printed = subprocess.run(command, shell=True, capture_output=True, text=True, timeout=60, check=True).stdout
    assert end in printed.partition("\n\n")[2] and printed.count("data: ") > 2


@pytest.mark.skipif(NODE is None, reason="no Node.js to run the JavaScript with")
@pytest.mark.parametrize(("page", "max_tokens"), [(API, 100), (CLIENTS, 40)])
def test_the_javascript_examples_print_the_text(server: Server, page: str, max_tokens: int) -> None:
    (program,) = re.findall(r"```js\n(.*?)```", page, re.DOTALL)
    command = [NODE, "--input-type=module", "-e", program.replace("http://127.0.0.1:8000", server.url)]
    printed = subprocess.run(command, capture_output=True, timeout=60, check=True).stdout.decode()
    assert printed.replace("\n", "") == _text(server, max_tokens).replace("\n", "")


@pytest.mark.parametrize("program", re.findall(r"```python\n(.*?)```", CLIENTS, re.DOTALL), ids=["openai", "httpx"])
def test_the_python_examples_print_the_text(program: str, server: Server) -> None:
    program = program.replace("http://127.0.0.1:8000", server.url)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=60)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode() == _text(server, 40)


def test_every_dependency_has_its_reason() -> None:
    lines = (ROOT / "pyproject.toml").read_text().splitlines()
    wanted = [line for line in lines if re.match(r'\s+"[a-z\-]+(\[\w+\])?[>=]', line)]
    assert len(wanted) > 15
    assert all("#" in line for line in wanted)


def test_constraints_pin_every_dependency_exactly() -> None:
    text = (ROOT / "constraints.txt").read_text()
    pins = dict(line.split("==") for line in text.splitlines() if line and not line.startswith("#"))
    names = re.findall(r'^\s+"([a-z\-]+)(?:\[\w+\])?[>=]', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    pinned = {name.lower().replace("_", "-") for name in pins}
    # ray: nothing installs that extra but make ray, which names its version. triton: a torch for CUDA names its own.
    assert {name for name in names if name not in ("setuptools", "ray", "triton")} <= pinned
    assert pins["torch"] == "2.13.0"
