"""What one streamed token passes: product files and their lines, and changes of file between two calls.

    python -m benchmarks.token_path [--weights DIR] [--serve-args="--kernels torch"] [--api native|openai] [--trace N]

Starts the service with a profile hook (sys.setprofile) in its processes, streams one request, and records the calls
of each process's main thread while tokens flow. A change of file is a call of a function in another product file than
the function called before.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx

_ROOT = Path(__file__).parents[1]
_FIRST, _TOKENS = 100, 200
"""The first recorded event, and how many are recorded."""
_HOOK = """
import atexit, json, os, signal, sys, time
_ROOT, _OUT = {root!r}, {out!r}
_PARTS = tuple(_ROOT + name for name in ("/app/", "/model/"))
def _begin(*_):
    files, state, last, trace = {{}}, dict(calls=0, changes=0), [""], []
    def hook(frame, event, arg):
        if event == "call":
            name = frame.f_code.co_filename
            if name.startswith(_PARTS):
                files.setdefault(name, set()).add(frame.f_code.co_firstlineno)
                state["calls"] += 1
                state["changes"] += name != last[0]
                last[0] = name
                if len(trace) < {n_traced}:
                    trace.append((name[len(_ROOT) + 1 :], frame.f_code.co_qualname))
    sys.setprofile(hook)
    def _end(*_):
        sys.setprofile(None)
        with open(_OUT + "/" + str(os.getpid()) + ".json", "w") as file:
            json.dump(dict(argv=sys.argv, files={{k: sorted(v) for k, v in files.items()}}, trace=trace, **state), file)
    import signal
    signal.signal(signal.SIGUSR2, _end)
import signal
signal.signal(signal.SIGUSR2, _begin)
"""


def _children(pid: int) -> list[int]:
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in text] + [one for child in text for one in _children(int(child))]


def _wait_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        if process.poll() is not None:
            raise SystemExit("the service ended")
        try:
            if httpx.get(f"{url}/health/ready", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            pass
        time.sleep(0.1)
    raise SystemExit("the service is not ready after a minute")


def _stream(url: str, api: str, n_tokens: int) -> AbstractContextManager[httpx.Response]:
    body = {"prompt": "Once upon a time", "max_tokens": n_tokens, "ignore_eos": True, "seed": 1, "stream": True}
    path = "/complete" if api == "native" else "/v1/completions"
    return httpx.stream("POST", url + path, json=body, timeout=120)


def _measure(url: str, pids: list[int], api: str) -> None:
    """Streams; records between two events."""
    with _stream(url, api, 400) as response:
        n_events = 0
        for line in response.iter_lines():
            if not line.startswith("data:"):
                continue
            n_events += 1
            if n_events in (_FIRST, _FIRST + _TOKENS):
                for pid in pids:
                    os.kill(pid, signal.SIGUSR2)


def _report(data: dict[str, Any]) -> tuple[set[str], dict[str, Any]]:
    files = set(data["files"])
    return files, {
        "files": len(files),
        "lines": sum(_n_lines(name) for name in files),
        "calls_per_token": round(data["calls"] / _TOKENS, 1),
        "changes_per_token": round(data["changes"] / _TOKENS, 1),
    }


def _n_lines(name: str) -> int:
    return len(Path(name).read_text().splitlines())


def main() -> None:
    """Prints one table per process, and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--weights", default=str(_ROOT / "weights"))
    parser.add_argument("--serve-args", default="--kernels torch")
    parser.add_argument("--api", choices=("native", "openai"), default="native")
    parser.add_argument(
        "--trace", type=int, default=0, metavar="N", help="also print the first N calls of each process"
    )
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
        probe.close()
        Path(folder, "sitecustomize.py").write_text(_HOOK.format(root=str(_ROOT), out=folder, n_traced=args.trace))
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([folder, str(_ROOT)])}
        command = [sys.executable, "-m", "app", "serve", "--weights", args.weights, "--port", str(port)]
        process = subprocess.Popen(
            [*command, *shlex.split(args.serve_args)], env=environment, cwd=_ROOT, stderr=subprocess.DEVNULL
        )
        try:
            url = f"http://127.0.0.1:{port}"
            _wait_ready(url, process)
            with _stream(url, args.api, 50) as response:
                response.read()
            pids = [process.pid]
            for pid in _children(process.pid):
                if b"app.engine" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    pids.append(pid)
            _measure(url, pids, args.api)
            time.sleep(1.0)
            results = {pid: json.loads(Path(folder, f"{pid}.json").read_text()) for pid in pids}
        finally:
            process.terminate()
            process.wait(20)
    everything: set[str] = set()
    summary: dict[str, Any] = {}
    for name, pid in zip(("api", "engine"), pids, strict=False):
        files, summary[name] = _report(results[pid])
        everything |= files
        print(f"{name}: {summary[name]}")
        for file in sorted(files, key=_n_lines):
            print(
                f"  {_n_lines(file):5d}  {Path(file).relative_to(_ROOT)}  {len(results[pid]['files'][file])} functions"
            )
        for file, function in results[pid]["trace"]:
            print(f"    {file}: {function}")
    summary["files"], summary["lines"] = len(everything), sum(map(_n_lines, everything))
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
