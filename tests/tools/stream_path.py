"""Which product files run while one streamed request is served: python -m tests.tools.stream_path.

Starts the service on the torch path with a profile hook in each of its processes, sends one request to warm up, forgets
what ran, sends a second one of the same kind, and prints the files of which a function was called by then.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path

from tests.support import ROOT
from tests.support.completion_client import stream
from tests.support.servers import running_server

HOOK = """
import os, sys, threading, time
_seen, _folder, _root = set(), os.environ["STREAM_PATH_FOLDER"], os.environ["STREAM_PATH_ROOT"]
_ours = tuple(f"{_root}/{name}/" for name in ("app", "model"))

def _hook(frame, event, _argument):
    if event == "call" and frame.f_code.co_name != "<module>" and frame.f_code.co_filename.startswith(_ours):
        _seen.add(frame.f_code.co_filename[len(_root) + 1 :])

def _watch():
    while not os.path.exists(f"{_folder}/forget"):
        time.sleep(0.05)
    _seen.clear()
    open(f"{_folder}/{os.getpid()}.forgot", "w").close()
    while not os.path.exists(f"{_folder}/tell"):
        time.sleep(0.05)
    with open(f"{_folder}/{os.getpid()}.new", "w") as file:
        file.write("\\n".join(sorted(_seen)))
    os.replace(file.name, f"{_folder}/{os.getpid()}.files")

threading.Thread(target=_watch, daemon=True).start()
threading.setprofile(_hook)
sys.setprofile(_hook)
"""


def files_of_a_stream() -> set[str]:
    """Of the API process and the engine process."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(HOOK)
        variables = {"PYTHONPATH": name, "STREAM_PATH_FOLDER": name, "STREAM_PATH_ROOT": str(ROOT)}
        variables["OMP_NUM_THREADS"] = "1"
        with running_server(folder, ROOT / "weights", "--kernels", "torch", environment=variables) as server:
            for signal, answer in (("forget", "*.forgot"), ("tell", "*.files")):
                stream(server.url, prompt="Once upon a time", max_tokens=8, seed=7)
                (folder / signal).touch()
                while len(list(folder.glob(answer))) < 2:
                    time.sleep(0.05)
            return {line for path in folder.glob("*.files") for line in path.read_text().splitlines()}


if __name__ == "__main__":
    lines = {name: (ROOT / name).read_text().count("\n") for name in sorted(files_of_a_stream())}
    print(f"files that run for one streamed request: {len(lines)} ({sum(lines.values())} lines)")
    print(*(f"  {name} {count}" for name, count in lines.items()), sep="\n")
