"""The benchmark of quality reads a text in every way, and its last line is the result as JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quality import main
from tests.support.model.tiny_models import TEXT, tiny_weights

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("native_library")
def test_the_last_line_is_one_json_object_with_every_way(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "text.txt").write_text(TEXT)
    weights = str(tiny_weights(tmp_path / "weights"))
    assert main(["--weights", weights, "--text", str(tmp_path / "text.txt"), "--tokens", "700"]) == 0
    _, *table, last = capsys.readouterr().out.splitlines()
    result = json.loads(last)
    assert (result["benchmark"], result["tokens"], len(table)) == ("quality", 700, 9)
    bits = {each["way"]: each["bits_per_byte"] for each in result["ways"]}
    assert bits["native float32"] == pytest.approx(bits["torch float32"], rel=1e-5)
    assert bits["native float32 int8"] == pytest.approx(bits["torch float32 int8"], rel=1e-5)
    assert bits["native float32 int8"] != pytest.approx(bits["native float32"], rel=1e-5), "nothing was rounded"
    assert bits["emulated bfloat16 fp8"] == pytest.approx(bits["torch bfloat16"], rel=0.05)
    assert bits["emulated bfloat16 fp8"] != pytest.approx(bits["torch bfloat16"], rel=1e-5), "nothing was rounded"
    assert bits["native bfloat16"] == pytest.approx(bits["torch float32"], rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--weights", "{}/none", "--text", "{}/text"), "none: no such directory"),
        (("--weights", "{}/weights", "--text", "{}/none"), "none: cannot be read (No such file or directory)"),
        (("--weights", "{}/weights", "--text", "{}/empty"), "empty: is too short: 2 tokens are the least"),
        (("--weights", "{}/weights", "--text", "{}/utf16"), "utf16: is not UTF-8"),
        (("--weights", "{}/weights", "--text", "{}/text", "--tokens", "-5"), "--tokens must be at least 2, not -5"),
        (("--weights", "{}/weights"), "the following arguments are required: --text"),
    ],
)
def test_what_cannot_be_read_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str
) -> None:
    tiny_weights(tmp_path / "weights")
    (tmp_path / "text").write_text(TEXT)
    (tmp_path / "empty").touch()
    (tmp_path / "utf16").write_text(TEXT, encoding="utf-16")
    with pytest.raises(SystemExit) as caught:
        main([argument.format(tmp_path) for argument in arguments])
    stderr = capsys.readouterr().err
    assert (caught.value.code, stderr.count("\n")) == (2, 1)
    assert stderr.startswith("error: ") and message in stderr
