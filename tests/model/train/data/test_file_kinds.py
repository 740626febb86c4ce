"""Which files are training text: names in any case, what a folder leaves out, and how to convert the rest."""

from __future__ import annotations

import codecs
import gzip
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from model.train.data.sources import DataError, Sources

TEXT = "Once upon a time\nthere was a caf\u00e9 \u2013 and \u201cquotes\u201d.\n"


def documents(*names: object) -> list[str]:
    """The documents of these sources."""
    return [text.decode() for _, text in Sources([str(name) for name in names]).documents()]


def problem(name: Path) -> str:
    """The error message of a source."""
    with pytest.raises(DataError) as caught:
        documents(name)
    return str(caught.value)


@pytest.mark.parametrize(
    "name", ["NOVEL.TXT", "a.Txt", "a.text", "a.md", "README.MARKDOWN", "a.txt.gz", "A.TXT.GZ", "a.Md.Gz"]
)
def test_text_is_found_whatever_the_case_of_its_suffix(tmp_path: Path, name: str) -> None:
    content = b"One.\n\n\nTwo."
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    assert documents(tmp_path) == documents(tmp_path / name) == ["One.", "Two."]
    assert Sources([str(tmp_path)]).left_out() == []


@pytest.mark.parametrize("name", ["a.jsonl", "A.JSONL", "a.ndjson", "a.NDJson", "A.JSONL.GZ", "a.ndjson.gz"])
def test_json_lines_are_found_whatever_their_suffix(tmp_path: Path, name: str) -> None:
    content = b'{"text": "One."}\n{"text": "Two."}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.lower().endswith(".gz") else content)
    assert documents(tmp_path) == documents(tmp_path / name) == ["One.", "Two."]


def test_folder_says_in_one_line_what_it_leaves_out(tmp_path: Path) -> None:
    for name in (
        "a.txt",
        "b.HTML",
        "deep/c.html",
        "d.pdf",
        "notes",
        ".hidden.txt",
        "e.txt.zip",
        "f.a-very-long-suffix",
    ):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/x.txt").write_text("not even counted")
    os.mkfifo(tmp_path / "pipe.txt")
    (line,) = Sources([str(tmp_path), str(tmp_path / "a.txt")]).left_out()
    found = re.fullmatch(rf"{re.escape(str(tmp_path))}: left out (.+) \(docs/train\.md\)", line)
    assert found
    assert set(found[1].split(", ")) == {
        "2 .html", "1 .pdf", "1 .zip", "2 without a suffix", "1 hidden", "1 not a file"
    }  # fmt: skip
    assert documents(tmp_path) == ["x"]
    for number in range(20):
        (tmp_path / f"x.s{number}").write_text("x")
    (line,) = Sources([str(tmp_path)]).left_out()
    counts = list(map(int, re.findall(r"(\d+) [^,(]+", line.partition("left out ")[2])))
    assert "others" in line and sum(counts) == 28


def test_folder_without_text_names_what_is_there(tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text("<p>")
    assert problem(tmp_path).startswith(f"{tmp_path}: no .txt, .text, .md, .markdown, .jsonl, .ndjson file")
    assert "left out 1 .html" in problem(tmp_path)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a.json", "use a .jsonl with one object per line"), ("A.HTML", "pandoc -t plain"), ("a.epub", "pandoc"),
        ("a.docx", "pandoc"), ("a.PDF", "pdftotext"), ("a.csv", "to a .jsonl"), ("a.parquet", "to a .jsonl"),
        ("a.zip", "unpack it"), ("a.tar.gz", "unpack it"), ("a.tgz", "unpack it"), ("a.txt.xz", "use .gz"),
        ("a.txt.zst", "use .gz"), ("a.html.gz", "pandoc"),
    ],
)  # fmt: skip
def test_named_file_of_another_kind_is_refused_with_the_remedy(tmp_path: Path, name: str, words: str) -> None:
    (tmp_path / name).write_bytes(b"x")
    message = problem(tmp_path / name)
    assert message.startswith(f"{tmp_path / name}: ") and words in message and "\n" not in message


@pytest.mark.parametrize("name", ["main.py", "notes", "data.tsv", "a.log"])
def test_named_file_of_an_unknown_kind_is_read_as_text(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("x = 1\n")
    assert documents(tmp_path / name) == ["x = 1"]


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"%PDF-1.7\n%\xe2\xe3", "pdftotext"), (b"PK\x03\x04\x14\0", "unpack it"),
        (gzip.compress(b"text", mtime=0), "add .gz to its name"),
        (b"\xfd7zXZ\0", "use .gz"), (b"\x7fELF\x02\0\0", "NUL byte"),
    ],
)  # fmt: skip
def test_other_content_under_a_text_name_is_refused_with_the_remedy(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "a.txt").write_bytes(content)
    assert words in problem(tmp_path)


@pytest.mark.skipif(shutil.which("iconv") is None, reason="needs iconv")
@pytest.mark.parametrize("name", ["a.txt", "it's a book.TXT", "a.txt.gz"])
@pytest.mark.parametrize(
    ("codec", "mark"),
    [
        ("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE), ("utf-16-le", b""), ("utf-16-be", b""),
        ("utf-32-le", codecs.BOM_UTF32_LE), ("utf-32-be", codecs.BOM_UTF32_BE), ("utf-32-le", b""), ("utf-32-be", b""),
        ("cp1252", b""),
    ],
)  # fmt: skip
def test_command_in_the_error_converts_the_file(tmp_path: Path, name: str, codec: str, mark: bytes) -> None:
    content = mark + TEXT.encode(codec)
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    message = problem(tmp_path / name)
    (command,) = re.findall(r"((?:zcat|iconv) .+)$", message)
    subprocess.run(["sh", "-c", command], check=True, cwd=tmp_path)
    (tmp_path / name).unlink()
    (converted,) = tmp_path.iterdir()
    assert documents(tmp_path) == documents(converted) == [TEXT.strip("\n")]


def test_bytes_of_an_unknown_encoding_ask_for_its_name(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("Это русский текст".encode("koi8-r"))
    assert re.search(r"with the name of its encoding \(iconv -l\): iconv -f ENCODING", problem(tmp_path))


def test_utf8_with_a_byte_order_mark_and_empty_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(codecs.BOM_UTF8 + TEXT.encode())
    (tmp_path / "b.txt").write_bytes(b"")
    assert documents(tmp_path) == [TEXT.strip("\n")]
    assert problem(tmp_path / "b.txt") == f"no text in {tmp_path / 'b.txt'}"


def test_broken_link_in_a_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").symlink_to(tmp_path / "gone")
    assert problem(tmp_path) == f"{tmp_path / 'a.txt'}: cannot be read (No such file or directory)"
