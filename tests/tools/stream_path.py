"""Which product files run while one streamed request is served: python -m tests.tools.stream_path [ROOT].

Starts the service of ROOT on the torch path with a profile hook in each of its processes, sends one request to warm up,
forgets what ran, sends a second one of the same kind, and prints the files of which a function was called by then.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

from tests.support import ROOT

HOOK = """
import os, sys, threading, time
_seen, _folder, _root = set(), os.environ["STREAM_PATH_FOLDER"], os.environ["STREAM_PATH_ROOT"]
_ours = tuple(f"{_root}/{name}/" for name in ("app", "model"))

def _hook(frame, event, _argument):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(_ours):
        _seen.add(frame.f_code.co_filename[len(_root) + 1 :])

def _watch():
    place = f"{_folder}/{os.getpid()}"
    forgot = False
    while True:
        time.sleep(0.05)
        if not forgot and os.path.exists(f"{_folder}/forget"):
            _seen.clear()
            forgot = True
            open(f"{place}.forgot", "w").close()
        if forgot and os.path.exists(f"{_folder}/tell"):
            with open(f"{place}.new", "w") as file:
                file.write("\\n".join(sorted(_seen)))
            os.replace(f"{place}.new", f"{place}.files")
            return

threading.Thread(target=_watch, daemon=True).start()
threading.setprofile(_hook)
sys.setprofile(_hook)
"""


def files_of_a_stream(root: Path) -> set[str]:
    """Of the API process and the engine process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        environment = {"PYTHONPATH": f"{folder}{os.pathsep}{root}", "STREAM_PATH_FOLDER": name}
        environment |= {"STREAM_PATH_ROOT": str(root), "OMP_NUM_THREADS": "1"}
        program = "from app.__main__ import main; main(['serve', '--port', '0', '--kernels', 'torch'])"
        with (folder / "log").open("w") as log:
            command = [sys.executable, "-c", program]
            service = subprocess.Popen(command, cwd=root, env={**os.environ, **environment}, stderr=log, stdout=log)
        try:
            url = _wait_ready(folder / "log")
            _stream(url)
            (folder / "forget").touch()
            _wait_for(folder, "*.forgot", 2)
            _stream(url)
            (folder / "tell").touch()
            return {line for path in _wait_for(folder, "*.files", 2) for line in path.read_text().split("\n") if line}
        finally:
            service.send_signal(signal.SIGTERM)
            service.wait(60)


def _wait_ready(log: Path) -> str:
    for _ in range(1200):
        if found := re.search(r"http://[\d.]+:\d+", log.read_text()):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{found[0]}/health/ready", timeout=5).close()
                return found[0]
        time.sleep(0.1)
    raise TimeoutError(log.read_text())


def _wait_for(folder: Path, pattern: str, count: int) -> list[Path]:
    for _ in range(600):
        if len(list(folder.glob(pattern))) >= count:
            time.sleep(0.3)
            return list(folder.glob(pattern))
        time.sleep(0.05)
    raise TimeoutError(pattern)


def _stream(url: str) -> None:
    body = json.dumps({"prompt": "Once upon a time", "max_tokens": 8, "stream": True, "seed": 7}).encode()
    request = urllib.request.Request(f"{url}/complete", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        assert b"done" in answer.read()


def main() -> None:
    """Prints files and their lines."""
    root = (Path(sys.argv[1]) if sys.argv[1:] else ROOT).resolve()
    files = sorted(files_of_a_stream(root))
    lines = [(root / name).read_text().count("\n") for name in files]
    print(f"files that run for one streamed request: {len(files)} ({sum(lines)} lines)")
    print(*(f"  {name} {n}" for name, n in zip(files, lines, strict=True)), sep="\n")


if __name__ == "__main__":
    main()
