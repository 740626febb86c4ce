"""python -m app VERB and inkstream VERB: finds the verb, and prints the usage."""

from __future__ import annotations

import argparse
import errno
import gc
import os
import re
import signal
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import partial

from app import VERSION

_USAGE = """usage: inkstream COMMAND [options]

  serve        serve a weights directory over HTTP, and a page to try it
                 inkstream serve --weights weights --port 8000 --open
  complete     complete a text with a running service
                 inkstream complete "Once upon a time" --max-tokens 100
  bench        benchmark a running service
                 inkstream bench --url http://127.0.0.1:8000
  check        validate a weights directory, and print its facts
                 inkstream check weights
  doctor       report what keeps the service from running or makes it slow
                 inkstream doctor
  compile      build the native kernels ahead of time
                 inkstream compile
  keys         manage the API keys of a service
                 inkstream keys add alice --keys-file keys.json
  completion   print a script with which a shell completes all of this
                 inkstream completion bash
  train        train a model on your text
                 inkstream train --data book.txt --out my-model --max-minutes 10

inkstream COMMAND --help lists the options of a command; inkstream --version
prints the version."""


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
        # The reader of this output has exited (| head); the interpreter must not try to flush it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        print(f"error: the output cannot be written ({error.strerror})", file=sys.stderr)
        return 1
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from model.machine import INSTALL_TORCH

        print(f"error: inkstream {verb} needs torch, which is not installed: {INSTALL_TORCH}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _open_standard_streams() -> None:
    """Opens /dev/null in place of closed standard streams: otherwise a socket could get descriptor 0, 1 or 2.

    sys.stdin and sys.stdout stay None, so that a verb can report that it has no input or no output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(number, True)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def _run(verb: str, rest: list[str]) -> int:
    # Ctrl+C during an import: pydantic and torch turn it into a traceback. There is nothing to clean up yet.
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # otherwise the parent process has set SIGINT to be ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(130))
    # Imports leave almost no garbage; collecting took an eighth of the API's CPU time at startup, and a third for a
    # verb that imports torch.
    gc.disable()
    run = _load(verb)
    gc.freeze()
    gc.enable()
    if run is None:
        return _print_usage(verb)
    if verb != "serve":  # the server installs its own handler before there is anything to clean up
        signal.signal(signal.SIGINT, before)
    return run(rest)


def _print_usage(verb: str) -> int:
    """Prints the version, the usage, or an error that lists the known verbs."""
    if verb in ("-V", "--version"):
        print(f"inkstream {VERSION}")
        return 0
    if verb and verb not in ("-h", "--help", "help"):
        known = re.findall(r"^  ([a-z]+)", _USAGE, re.MULTILINE)
        hint = "".join(f"did you mean {near}? " for near in get_close_matches(verb, known, n=1))
        verbs = f"the verbs are {', '.join(known)}; see inkstream --help"
        print(f"error: {verb[:60]!r} is not a verb; {hint}{verbs}", file=sys.stderr)
        return 2
    print(_USAGE, file=sys.stderr if not verb else sys.stdout)
    return 2 if not verb else 0


def _load(verb: str) -> Callable[[list[str]], int] | None:
    """Imports a verb only when it is called, so that serve does not wait for train's torch."""
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
        case "doctor":
            from app.cli.doctor import main as run
        case "keys":
            from app.cli.keys import main as run
        case "completion":
            from app.cli.completion import main as write_script

            return partial(write_script, parsers=_parsers)
        case "train":
            from model.train.__main__ import main as run
        case _:
            return None
    return run


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb; importing them all takes two seconds."""
    from app.cli import check, complete, doctor, keys, serve
    from app.cli import compile as compile_verb
    from benchmarks import load
    from model.train.setup import options

    return {
        "serve": serve.build_parser(),
        "complete": complete.build_parser(),
        "bench": load.build_parser(),
        "check": check.build_parser(),
        "doctor": doctor.build_parser(),
        "compile": compile_verb.build_parser(),
        "keys": keys.build_parser(),
        "train": options.parser(),
    }


if __name__ == "__main__":
    sys.exit(main())
