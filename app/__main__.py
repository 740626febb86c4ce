"""python -m app serve | complete | bench | check | compile | keys, and `inkstream` with the same verbs and train."""

from __future__ import annotations

import errno
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence

_USAGE = """usage: inkstream VERB [options]

  serve                serve a weights directory over HTTP
  complete "text"      continue a text through a running service
  bench --url URL      load a running service and print its speed
  check DIR            validate a weights directory
  compile              build the native kernels up front
  keys add|list|revoke NAME        say who may use a service
  train --data PATH... --out DIR   train a model (python -m model.train)

inkstream VERB --help tells a verb's options."""


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: those of the verb; 2 for an unknown one."""
    _open_standard_streams()
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    try:
        code = _run(verb, rest)
        if sys.stdout:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        # Whoever read our output has gone (| head); the interpreter must not try to flush it at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Puts /dev/null where one of them is closed: the next file to be opened, our socket, would get its number.

    sys.stdin and sys.stdout stay None, so that a verb can say that it has nothing to read, or nowhere to write.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest number that is free, this one
            os.set_inheritable(number, True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _run(verb: str, rest: list[str]) -> int:
    # Ctrl+C in an import: pydantic and torch make an error of it, with a traceback. There is nothing to tidy up yet.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # else whoever started us wants it to be ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # Imports leave next to no garbage; looking for it took an eighth of the API's CPU time at start, and a third of
    # that of a verb with torch.
    gc.disable()
    run = _load(verb)
    gc.freeze()
    gc.enable()
    if run is None:
        return _explain(verb)
    if verb != "serve":  # the server takes the signal over before there is something to tidy up
        signal.signal(signal.SIGINT, before)
    return run(rest)


def _explain(verb: str) -> int:
    """What to call instead of something that is no verb: the list, where nothing was said or help is wanted."""
    if verb and verb not in ("-h", "--help", "help"):
        known = ", ".join(re.findall(r"^  ([a-z]+)", _USAGE, re.MULTILINE))
        print(
            f"error: {verb[:60]!r} is no verb; verbs are {known}; inkstream --help tells what they do", file=sys.stderr
        )
        return 2
    print(_USAGE, file=sys.stderr if not verb else sys.stdout)
    return 2 if not verb else 0


def _load(verb: str) -> Callable[[list[str]], int] | None:
    """Each verb is imported when it is asked for: serve must answer before train's torch would be loaded."""
    match verb:
        case "serve":
            from app.cli.serve import main as run
        case "complete":
            from app.cli.complete import main as run
        case "bench":
            from benchmarks.load import main as run
        case "check":
            from app.cli.check import main as run
        case "compile":
            from app.cli.compile import main as run
        case "keys":
            from app.cli.keys import main as run
        case "train":
            from model.train.__main__ import main as run
        case _:
            return None
    return run


if __name__ == "__main__":
    sys.exit(main())
