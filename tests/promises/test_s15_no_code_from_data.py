"""No input is ever executed as code: no eval, no torch.load, and no pickle but in the confined reader of `convert`,
which calls nothing that a pickle names."""

from __future__ import annotations

import ast
import json
import time
from pathlib import Path

import httpx
import pytest

from tests.support import ROOT
from tests.support.completion_client import fetch_completion, stream
from tests.support.promise_figures import Promise
from tests.support.servers import Server
from tests.support.services import Services

FILES = sorted(path for folder in ("app", "model") for path in (ROOT / folder).rglob("*.py"))
MODULES = {
    "pickle", "_pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "code", "codeop", "pty",
    "multiprocessing", "zmq",
}  # fmt: skip
"""Calls that turn bytes or text into running code."""
NAMES = {"eval", "exec", "compile", "__import__", "breakpoint"}
METHODS = {
    ("torch", "load"), ("torch", "hub"), ("torch", "package"), ("torch", "jit"), ("os", "system"), ("os", "popen"),
    ("numpy", "load"), ("np", "load"), ("yaml", "load"), ("yaml", "unsafe_load"), ("Path", "exec_module"),
}  # fmt: skip
KEYWORDS = {("shell", True), ("allow_pickle", True), ("trust_remote_code", True), ("weights_only", False)}

HOOK = """
import json, os, sys, time
_log = os.open(os.environ["AUDIT_LOG"], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
_OURS = tuple(os.path.join(os.environ["AUDIT_ROOT"], name) + os.sep for name in ("app", "model"))
def _hook(event, arguments):
    if event not in ("pickle.find_class", "compile", "exec", "os.system", "marshal.load"):
        return
    name = getattr(arguments[0], "co_filename", "") if event == "exec" else arguments[-1] if event == "compile" else ""
    if isinstance(name, str) and (name.endswith(".py") or name.startswith("<frozen")):
        return  # the file of a module that is imported
    frame, by = sys._getframe().f_back, ""
    while frame is not None and not by:
        by = frame.f_code.co_filename if not frame.f_code.co_filename.startswith("<") else ""
        frame = frame.f_back
    record = {"event": event, "what": str(arguments)[:200], "by": by, "ours": by.startswith(_OURS), "at": time.time()}
    os.write(_log, (json.dumps({"pid": os.getpid(), **record}) + "\\n").encode())
sys.addaudithook(_hook)
os.write(_log, (json.dumps({"pid": os.getpid(), "event": "armed"}) + "\\n").encode())
"""
"""sitecustomize.py of every Python process that the service starts: the only way to hook the engine process."""

SABOTAGE = """
import pathlib, pickle, app.serving.service as s
real = s.Service.begin
def begin(self, *arguments):
    pickle.loads(pickle.dumps(pathlib.PurePath("x")))
    eval("1 + 1")
    return real(self, *arguments)
s.Service.begin = begin
"""


CONFINED = ROOT / "model/checkpoint/torch_file.py"
"""Reads pickles of convert without calling what they name, in a process that can open no file."""


def harmful_nodes(source: str) -> list[str]:
    """Names in the source that could execute data as code."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.partition(".")[0] in MODULES]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found += [node.module] if node.module.partition(".")[0] in MODULES else []
            found += [f"{node.module}.{a.name}" for a in node.names if (node.module, a.name) in METHODS]
        elif isinstance(node, ast.Name) and node.id in NAMES:
            found.append(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            found += [f"{node.value.id}.{node.attr}"] if (node.value.id, node.attr) in METHODS else []
        elif isinstance(node, ast.keyword) and isinstance(node.value, ast.Constant):
            found += [f"{node.arg}={node.value.value}"] if (node.arg, node.value.value) in KEYWORDS else []
    return found


def test_no_file_names_a_code_loader(promise: Promise) -> None:
    files = [path for path in FILES if path != CONFINED]
    found = {str(path.relative_to(ROOT)): names for path in files if (names := harmful_nodes(path.read_text()))}
    promise.all_of("files of app/ and model/ that name no pickle, eval or loader", len(files) - len(found), len(files))
    assert found == {}


def test_only_a_confined_process_reads_pickles_and_no_service_does() -> None:
    """Of files that convert is given. Its class calls nothing that a pickle names: tests of torch_file say so."""
    assert harmful_nodes(CONFINED.read_text()) == ["pickle"]
    callers = [path for path in FILES if path != CONFINED and "answer_question" in path.read_text()]
    assert callers == [ROOT / "app/cli/torch_file_worker.py"]


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "import joblib.numpy_pickle", "from marshal import loads", "from torch import load", "eval(x)",
        "f = exec", "__import__(name)", "torch.load(path)", "torch.hub.load(x)", "os.system(x)", "run(x, shell=True)",
        "np.load(x, allow_pickle=True)", "AutoModel.from_pretrained(x, trust_remote_code=True)",
        "load(x, weights_only=False)", "def f():\n    import dill",
    ],
)  # fmt: skip
def test_code_loaders_are_detected(source: str) -> None:
    assert harmful_nodes(source)


def _start(serve: Services, folder: Path, sabotage: str = "pass") -> tuple[Server, Path]:
    hook, log = folder / "hook", folder / "audit"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(HOOK)
    environment = {"PYTHONPATH": str(hook), "AUDIT_LOG": str(log), "AUDIT_ROOT": str(ROOT)}
    return serve(environment=environment, sabotage=sabotage), log


def _ask(server: Server, words: str) -> None:
    """Send a stream, a request for prompt log-probabilities, a guided completion and an invalid request."""
    assert stream(server.url, prompt=words, max_tokens=20, seed=1)[-1].name == "done"
    assert fetch_completion(server.url, prompt=words, max_tokens=5, logprobs=3, echo=True)["choices"]
    assert fetch_completion(server.url, prompt=words, max_tokens=10, regex="[a-c]+|__import__\\('os'\\)")["choices"]
    assert httpx.post(f"{server.url}/complete", json={"prompt": words, "seed": words}).status_code == 400


def _has_loaded(log: Path, processes: int) -> bool:
    """Whether this many processes have started and none has imported anything for a second."""
    before = log.read_text()
    time.sleep(1.0)
    return before.count('"armed"') >= processes and log.read_text() == before


def test_no_process_executes_data(serve: Services, tmp_path: Path, promise: Promise) -> None:
    server, log = _start(serve, tmp_path)
    _ask(server, "The moon")  # warm-up: msgspec evaluates annotations of structs on first use
    assert server.wait_for(lambda: _has_loaded(log, 4)), "a second grammar validator starts after the first one"
    before = log.read_text().count("\n")
    _ask(server, "eval('1') {{ 7*7 }} ${x} __import__('os')")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    processes = {event["pid"] for event in events if event["event"] == "armed"}
    assert server.process.pid in processes and len(processes) >= 4, "API, engine, and two grammar validators"
    audited = [event for event in events if event["event"] != "armed"]
    assert audited, "the hook must record the annotations that libraries evaluate on import"
    harmful = [e for e in audited if e["ours"] or e["event"] in ("pickle.find_class", "os.system", "marshal.load")]
    print(*harmful, *events[before:], sep="\n")
    promise.at_most(
        "uses of pickle, or of compile and exec by inkstream's code", len(harmful), target=0, n=len(audited)
    )
    promise.at_most("strings compiled or executed while serving", len(events) - before, target=0, n=4)


def test_unpickling_and_eval_are_detected(serve: Services, tmp_path: Path) -> None:
    server, log = _start(serve, tmp_path, SABOTAGE)
    _ask(server, "x")
    events = [json.loads(line) for line in log.read_text().splitlines()]
    kinds = {event["event"] for event in events if any(w in event.get("what", "") for w in ("PurePosixPath", "1 + 1"))}
    assert {"pickle.find_class", "compile"} <= kinds
