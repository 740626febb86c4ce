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
from model.train.dry_run import forecast, resolve_preset
from model.train.interrupts import Interrupted
from model.train.loop import Diverged
from model.train.output_dir import locked
from model.train.reporting.console import print_stderr, program_command, program_name
from model.train.run import Run
from model.train.step.distributed import PeerExited, ProcessGroup, join
from model.train.step.thread_pool import is_out_of_memory, keep_freed_memory

_NO_MEMORY = (
    "out of memory; use a smaller --micro-windows, --windows, --context or --preset. Saved state is kept: --resume"
)


def run(options: argparse.Namespace, argv: Sequence[str]) -> int:
    """Exit codes: 0 done, 1 another rank exited, 2 bad input, 3 diverged, 129 / 130 / 143 interrupted and saved."""
    ranks = ProcessGroup()
    arguments = [argument for argument in argv if argument not in ("--resume", "--overwrite")]
    resume_command = shlex.join([*program_command("train"), *arguments, "--resume"])
    try:
        ranks = join(device=options.device)
        ranks.require_divisible(options.windows)
        if options.dry_run:
            if ranks.is_main:
                resolve_preset(options)
                forecast(options)
            return 0
        with _only_main_prints_and_locks(options, ranks):
            ranks.main_process_first(lambda: resolve_preset(options, follows=not ranks.is_main))
            keep_freed_memory()
            Run(options, f"{program_name()} {shlex.join(argv)}", ranks, resume_command=resume_command).train()
    except ValueError as error:  # DataError, ConfigError, TokenizerError, CheckpointError: user-facing messages
        return _failed(error, 2) if ranks.claims_message(str(error)) else 2
    except Diverged as error:
        return _failed(error, 3) if ranks.is_main else 3
    except PeerExited as error:
        return _failed(error, 1)
    except Interrupted as interrupt:
        if ranks.is_main:
            print_stderr(f"interrupted by {interrupt}; everything is saved. Continue with:\n{resume_command}")
        return interrupt.exit_code
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        return _failed(_NO_MEMORY, 2) if ranks.claims_message(_NO_MEMORY) else 2
    except KeyboardInterrupt:  # before the first step: nothing to save
        return 130
    finally:
        ranks.destroy()
        _detach_closed_stdout()
    return 0


def _failed(error: object, code: int) -> int:
    print(f"error: {one_line(str(error))}", file=sys.stderr)
    return code


def _detach_closed_stdout() -> None:
    """Redirects stdout if its reader has closed it; otherwise the interpreter fails to flush it at exit."""
    try:
        if sys.stdout:
            sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _only_main_prints_and_locks(options: argparse.Namespace, ranks: ProcessGroup) -> Iterator[None]:
    """Locks the output directory in the main rank, and discards the output of all others."""
    if ranks.is_main:
        with locked(Path(options.out), overwrite=options.overwrite):
            yield
    else:
        with Path(os.devnull).open("w") as devnull, contextlib.redirect_stdout(devnull):
            yield
