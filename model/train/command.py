"""Command of one training run: exit codes, and error messages for runs that fail or are interrupted."""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from model.files import one_line
from model.train.common.console import Diverged, Interrupted, python, tell
from model.train.common.output_dir import held
from model.train.common.thread_pool import is_out_of_memory, keep_freed_memory
from model.train.run import Run
from model.train.setup.dry_run import forecast, settle_size
from model.train.step.distributed import LeftAlone, ProcessGroup, join

_NO_MEMORY = (
    "out of memory; take a smaller --micro-windows, --windows, --context or --preset. What was saved stays: --resume"
)


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 2 bad input, 3 diverged, 129 / 130 / 143 a signal, saved; 1 left alone by another rank."""
    ranks = ProcessGroup()
    try:
        ranks = join(device=options.device)
        ranks.must_share(options.windows)
        if options.dry_run:
            if ranks.is_first:
                settle_size(options)
                forecast(options)
            return 0
        with _quiet_unless(ranks.is_first), _alone(options, ranks):
            ranks.in_turn(lambda: settle_size(options, follows=not ranks.is_first))
            keep_freed_memory()
            Run(options, shlex.join(["python", "-m", "model.train", *argv]), ranks).train()
    except ValueError as error:  # DataError, ConfigError, TokenizerError, CheckpointError: all speak to the user
        return _failed(error, 2) if ranks.tells(str(error)) else 2
    except Diverged as error:
        return _failed(error, 3) if ranks.is_first else 3
    except LeftAlone as error:
        return _failed(error, 1)
    except Interrupted as interrupt:
        kept = [argument for argument in argv if argument not in ("--resume", "--overwrite")]
        again = shlex.join([python(), "-m", "model.train", *kept, "--resume"])
        if ranks.is_first:
            tell(f"interrupted by {interrupt}; everything is saved. Go on with:\n{again}")
        return interrupt.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _failed(_NO_MEMORY, 2) if ranks.tells(_NO_MEMORY) else 2
    except KeyboardInterrupt:  # before the first step; nothing is lost
        return 130
    finally:
        ranks.leave()
        _let_go_of_stdout()
    return 0


def _failed(error: object, code: int) -> int:
    print(f"error: {one_line(str(error))}", file=sys.stderr)
    return code


def _let_go_of_stdout() -> None:
    """Redirects stdout if its reader has closed it: the interpreter would fail to flush it at exit."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _alone(options: argparse.Namespace, ranks: ProcessGroup) -> contextlib.AbstractContextManager[None]:
    """The output directory belongs to this run; of several ranks the first one says so for all."""
    if not ranks.is_first:
        return contextlib.nullcontext()
    return held(Path(options.out), overwrite=options.overwrite)


@contextlib.contextmanager
def _quiet_unless(speaks: bool) -> Iterator[None]:
    """Of several ranks, one speaks."""
    if speaks:
        yield
        return
    with Path(os.devnull).open("w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
