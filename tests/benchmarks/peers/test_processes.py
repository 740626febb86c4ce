"""Sides that run as processes, and tools that fail: small fakes, no peer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks.load_plan import LoadPlan
from benchmarks.peers.peer_pool import AdapterError, AdapterProcess, plain_environment
from benchmarks.peers.provision import ConvertError, Environment, InstallError, convert_once, install
from benchmarks.peers.servers import InProcessTarget

SIDE = """
import time
from benchmarks.peers.adapters.protocol import DecodeResult as Generated, ServeResult as Loaded, run
from benchmarks.peers.adapters.protocol import Adapter, UnsupportedError
class Fake(Adapter):
    def __init__(self, task):
        print("chatter of a library")
        if task.precision == "int8":
            raise UnsupportedError("no int8 here")
        if task.precision == "f32":
            raise OSError("broken\\nin two lines")
    def facts(self):
        return {"version": "1"}
    def decode(self, prompts, tokens):
        print("more chatter")
        if tokens == 13:
            raise MemoryError("all gone")
        return Generated(seconds=0.5, rows=[[7] * tokens for _ in prompts])
    def prefill(self, prompt):
        return 0.25
    def serve(self, load):
        if load.streams == 2:
            raise UnsupportedError("one stream only")
        return Loaded(seconds=2.0, tokens=load.tokens * len(load.prompts) - (load.streams > 2), first=[0.1], gaps=[0.2])
run(Fake)
"""
TASK = ["--model=m", "--threads=1", "--batch=2", "--length=8"]
PROMPT = {"vocab_size": 50, "rows": 2, "length": 4, "seed": 0}


def child(tmp_path: Path, precision: str = "bf16") -> AdapterProcess:
    command = [sys.executable, "-c", SIDE, *TASK, "--precision", precision]
    return AdapterProcess(command, log=tmp_path / "log", environment={})


def test_a_side_answers_one_question_after_the_other_whatever_its_library_prints(tmp_path: Path) -> None:
    side = child(tmp_path)
    try:
        assert side.facts() == {"version": "1"}
        assert side.ask("decode", tokens=3, **PROMPT) == {"seconds": 0.5, "lengths": [3, 3], "ids": [7, 7, 7]}
        assert side.ask("prefill", tokens=1, **PROMPT) == {"seconds": 0.25, "tokens": 4}
        with pytest.raises(AdapterError, match="one stream only"):
            side.ask("serve", streams=2, prompts=["a"], tokens=2, temperature=0.8)
        assert side.ask("prefill", tokens=1, **PROMPT)["tokens"] == 4
    finally:
        side.close()
    assert (tmp_path / "log").read_text().startswith("chatter of a library\n")


@pytest.mark.parametrize(("precision", "message"), [("int8", "no int8 here"), ("f32", "OSError: broken")])
def test_a_side_that_cannot_load_says_why(tmp_path: Path, precision: str, message: str) -> None:
    side = child(tmp_path, precision)
    with pytest.raises(AdapterError, match=f"^{message}$"):
        side.facts()
    side.close()


def test_a_side_that_dies_says_why(tmp_path: Path) -> None:
    side = child(tmp_path)
    side.facts()
    with pytest.raises(AdapterError, match=r"^MemoryError: all gone$"):
        side.ask("decode", tokens=13, **PROMPT)
    with pytest.raises(AdapterError, match="its process ended with 1: "):
        side.ask("decode", tokens=3, **PROMPT)
    side.close()


def test_no_side_is_steered_by_what_this_shell_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "KMP_BLOCKTIME", "INKSTREAM_KERNELS", "PYTHONPATH"):
        monkeypatch.setenv(name, "x")
    monkeypatch.setenv("LANG", "C")
    found = plain_environment()
    assert found["LANG"] == "C" and not {"OMP_WAIT_POLICY", "KMP_BLOCKTIME", "INKSTREAM_KERNELS"} & found.keys()


def test_a_load_that_gave_too_few_tokens_is_refused(tmp_path: Path) -> None:
    side = child(tmp_path)
    side.facts()
    plan = LoadPlan(streams=(1,), requests=4, max_tokens=8)
    assert InProcessTarget(side).sample(plan, 0).tokens_per_second == 16
    with pytest.raises(AdapterError, match="asked for 4 x 8 tokens, it gave 31"):
        InProcessTarget(side).sample(LoadPlan(streams=(3,), requests=4, max_tokens=8), 0)
    side.close()


def test_a_conversion_is_there_whole_or_not_at_all_and_made_once(tmp_path: Path) -> None:
    write = "import sys; open(sys.argv[1], 'w').write(sys.argv[2])"
    target = convert_once(tmp_path / "models/a.bin", [sys.executable, "-c", write], after=["first"])
    assert convert_once(target, [sys.executable, "-c", write], after=["second"]).read_text() == "first"
    fail = "import sys; open(sys.argv[1], 'w'); sys.exit('SomeError: no such layer')"
    with pytest.raises(ConvertError, match="the conversion failed: SomeError: no such layer"):
        convert_once(tmp_path / "b.bin", [sys.executable, "-c", fail])
    assert not (tmp_path / "b.bin").exists()


def test_a_peer_that_cannot_be_installed_is_an_error_with_a_reason(tmp_path: Path) -> None:
    (tmp_path / "peer").write_text("in the way")
    with pytest.raises(InstallError, match=r"python.* -m venv .*: .*(rror|File exists).*"):
        install(Environment(name="peer", packages=("nothing",)), tmp_path)
