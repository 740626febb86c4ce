"""python -m model.train: the command line around one run. Knows the exit codes and no training."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from model.train.options import parse
from model.train.progress import python, tell
from model.train.run import Diverged, Interrupted, Run


def main(argv: Sequence[str] | None = None) -> int:
    """Exit codes: 0 done, 2 bad input, 3 diverged, 130 / 143 interrupted with everything saved."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    options = parse(arguments)
    try:
        Run(options, shlex.join(["python", "-m", "model.train", *arguments])).train()
    except ValueError as error:  # DataError, ConfigError, TokenizerError, CheckpointError: all speak to the user
        print(f"error: {error}", file=sys.stderr)
        return 2
    except Diverged as error:
        print(f"error: {error}", file=sys.stderr)
        return 3
    except Interrupted as interrupt:
        kept = [argument for argument in arguments if argument not in ("--resume", "--overwrite")]
        again = shlex.join([python(), "-m", "model.train", *kept, "--resume"])
        tell(f"interrupted by {interrupt}; everything is saved. Go on with:\n{again}")
        return interrupt.exit_code
    except KeyboardInterrupt:  # before the first step; nothing is lost
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
