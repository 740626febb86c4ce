"""python -m app VERB and inkstream VERB: finds the verb, and prints the usage."""

from __future__ import annotations

import errno
import gc
import os
import signal
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any

from app.common.start_signals import hold_signals

if TYPE_CHECKING:
    import argparse
    from types import FrameType

_VERBS = {
    "serve": ("app.cli.serve", "serve a weights directory over HTTP, and a page to try it", "--weights weights --open"),
    "complete": ("app.cli.complete", "complete a text with a running service", '"Once upon a time" --max-tokens 100'),
    "bench": ("benchmarks.load", "benchmark a running service", "--url http://127.0.0.1:8000"),
    "check": ("app.cli.check", "validate a weights directory, and print its facts", "weights"),
    "convert": ("app.cli.convert", "convert weights to safetensors, dense or quantized", "SRC OUT --quantize int4"),
    "doctor": ("app.cli.doctor", "report what keeps the service from running or makes it slow", ""),
    "compile": ("app.cli.compile", "build the native kernels ahead of time", ""),
    "keys": ("app.cli.keys", "manage the API keys of a service", "add alice --keys-file keys.json"),
    "completion": ("app.cli.completion", "print a script with which a shell completes all of this", "bash"),
    "train": ("model.train.__main__", "train a model on your text", "--data book.txt --out my-model --max-minutes 10"),
}
"""Verb -> its module, which is imported when it is called (serve does not wait for train's torch); help, example."""
_LINES = [f"  {verb:<12} {text}\n{'':17}inkstream {verb} {words}".rstrip() for verb, (_, text, words) in _VERBS.items()]
_USAGE = "\n".join(
    [
        "usage: inkstream COMMAND [options]\n",
        *_LINES,
        "\ninkstream COMMAND --help lists the options of a command; inkstream --version\nprints the version.",
    ]
)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the verb's exit code, or 2 for an unknown verb."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    verb, rest = (arguments[0], arguments[1:]) if arguments else ("", [])
    before = signal.getsignal(signal.SIGINT)
    hold_signals(serves=verb == "serve")
    _open_standard_streams()
    try:
        code = _run(verb, rest, before)
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


def _run(verb: str, rest: list[str], before: Callable[[int, FrameType | None], Any] | int | None) -> int:
    """Imports the verb's module and calls it, with the handler of SIGINT from before."""
    # Imports leave almost no garbage; collecting took an eighth of the API's CPU time at startup, and a third for a
    # verb that imports torch.
    gc.disable()
    module = import_module(_VERBS[verb][0]) if verb in _VERBS else None
    gc.freeze()
    gc.enable()
    if module is None:
        return _print_usage(verb)
    if verb != "serve":  # the server installs its own handler before there is anything to clean up
        signal.signal(signal.SIGINT, before)
    code: int = module.main(rest, parsers=_parsers) if verb == "completion" else module.main(rest)
    return code


def _print_usage(verb: str) -> int:
    """Prints the version, the usage, or an error that lists the known verbs."""
    if verb in ("-V", "--version"):
        from app.common.version import VERSION

        print(f"inkstream {VERSION}")
        return 0
    if verb and verb not in ("-h", "--help", "help"):
        from difflib import get_close_matches

        hint = "".join(f"did you mean {near}? " for near in get_close_matches(verb, _VERBS, n=1))
        verbs = f"the verbs are {', '.join(_VERBS)}; see inkstream --help"
        print(f"error: {verb[:60]!r} is not a verb; {hint}{verbs}", file=sys.stderr)
        return 2
    print(_USAGE, file=sys.stderr if not verb else sys.stdout)
    return 2 if not verb else 0


def _parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of each verb but completion; importing them all takes two seconds."""
    modules = {verb: module for verb, (module, _, _) in _VERBS.items() if verb not in ("completion", "train")}
    parsers = {verb: import_module(module).build_parser() for verb, module in modules.items()}
    return {**parsers, "train": import_module("model.train.options").parser()}


if __name__ == "__main__":
    sys.exit(main())
