"""Each page as one document: modules joined in the order of their imports, compressed and revalidated."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import httpx
import pytest

from app.api.page_bundle import bundle, join_modules
from tests.support.nodejs import NODE
from tests.support.servers import Server

MODULES = {
    "main.js": 'import { twice as double, Box } from "./parts/box.js";\nimport "./log.js";\n'
    "await null;\nlog.push(double(new Box(4).value));\nconsole.log(log.join());\n",
    "log.js": 'globalThis.log = ["log"];\n',
    "parts/box.js": '// A comment.\nimport { FACTOR } from "../factor.js";\n\n/** Doc. */\nexport class Box {\n'
    "  constructor(value) {\n    this.value = value * FACTOR;\n  }\n}\n\n"
    'export function twice(n) {\n  return 2 * n; // import { x } from "./none.js";\n}\n\n'
    "export async function* unused() {}\n",
    "factor.js": "export const FACTOR = 3;\nconst Box = 0;\n",
}


def test_joined_script_behaves_like_its_modules() -> None:
    joined = join_modules("main.js", MODULES.__getitem__)
    order = re.findall(r"^// (\S+\.js)$", joined, re.MULTILINE)
    assert order == ["factor.js", "parts/box.js", "log.js", "main.js"]
    node = NODE or pytest.skip("no node: make install brings playwright's")
    run = subprocess.run([node, "--input-type=module", "-e", joined], capture_output=True, text=True, timeout=60)
    assert run.stdout == "log,24\n", run.stderr


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('import "./main.js";', "import each other"),
        ("export default 1;", "cannot join"),
        ("export let count = 1;", "cannot join"),
        ('import * as all from "./log.js";', "cannot join"),
    ],
)
def test_modules_that_cannot_be_joined_are_an_error(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        join_modules("main.js", {**MODULES, "factor.js": f"{line}\n{MODULES['factor.js']}"}.__getitem__)


def test_page_inlines_styles_and_script_and_versions_its_fonts(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        '    <link rel="stylesheet" href="web/a.css">\n    <link rel="stylesheet" href="web/b.css">\n'
        '    <script type="module" src="web/page.js"></script>\n'
    )
    (tmp_path / "a.css").write_text('a { src: url("f.woff2") }\n')
    (tmp_path / "b.css").write_text("b {}\n")
    (tmp_path / "page.js").write_text("let a = 1;\n")
    (tmp_path / "f.woff2").write_bytes(b"font")
    files = bundle(tmp_path, "page")
    assert files.keys() == {"page.html", "f.woff2"}
    style, script = files["page.html"].content.body.decode().split("</style>\n")
    assert re.fullmatch(r' *<style>a { src: url\("web/f.woff2\?v=\w{16}"\) }\nb {}\n', style)
    assert script == '    <script type="module">// page.js\nlet a = 1;\n</script>\n'


@pytest.mark.parametrize("text", ['let a = "</script>";', 'let a = "<!-- <script>";'])
def test_script_that_the_html_parser_would_cut_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "page.html").write_text('<script type="module" src="web/page.js"></script>\n')
    (tmp_path / "page.js").write_text(text)
    with pytest.raises(ValueError, match="would not read past"):
        bundle(tmp_path, "page")


def test_files_are_compressed_versioned_and_revalidated(server: Server) -> None:
    page = httpx.get(server.url)
    assert page.headers["cache-control"] == "no-cache, no-transform", "a changed script has another hash"
    assert not re.search(r'<script[^>]+src=|rel="stylesheet"', page.text), "one response"
    font, *others = set(re.findall(r'(?:href=|src=|url\()"(web/[^"]+)"', page.text))
    assert re.fullmatch(r"web/literata\.woff2\?v=\w{16}", font) and others == []
    response, old = httpx.get(f"{server.url}/{font}"), httpx.get(f"{server.url}/{font.partition('?')[0]}?v=old")
    assert "immutable" in response.headers["cache-control"] and "content-encoding" not in response.headers
    assert old.headers["cache-control"] == "no-cache, no-transform" and old.content == response.content
    for encoding in ("gzip", "identity", "gzip;q=0"):
        plain = httpx.get(server.url, headers={"Accept-Encoding": encoding})
        assert plain.headers.get("content-encoding") == ("gzip" if encoding == "gzip" else None)
        assert plain.text == page.text and plain.headers["vary"] == "Accept-Encoding"
        known = {"Accept-Encoding": encoding, "If-None-Match": f'"other", {plain.headers["etag"]}'}
        unchanged = httpx.get(server.url, headers=known)
        assert unchanged.status_code == 304 and not unchanged.content
        assert unchanged.headers["etag"] == plain.headers["etag"]
        assert "content-security-policy" in unchanged.headers
        other = httpx.get(server.url, headers={"Accept-Encoding": encoding, "If-None-Match": '"other"'})
        assert other.status_code == 200
