"""Mutated GGUF files, each read once: python -m tests.support.model.gguf_mutations --count 10000 --seed 1 [--models].

A file is read or refused with one line that names it, in little memory and time: anything else is a failure. With
--models they are mutations of a model, which is opened as weights with its tokenizer.
"""

from __future__ import annotations

import argparse
import struct
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from random import Random

from model.checkpoint.gguf_directory import opened_weights
from model.checkpoint.stored_weights import find_weights
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError
from model.gguf.gguf_file import GgufFile, MetadataArray
from tests.support.model.gguf_files import small_file
from tests.support.model.tiny_gguf import tiny_gguf

MAX_BYTES = 64 << 20
"""More than the file's own size."""
_SECONDS = 2.0
_LENGTHS = (0, 1, 2, 3, 7, 8, 255, 2**16, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**40, 2**62, 2**63, 2**64 - 1)


def mutated(content: bytes, random: Random) -> bytes:
    """The content with one to three changes, most of them in the header."""
    for _ in range(random.choice((1, 1, 2, 3))):
        content = random.choice(_MUTATIONS)(content, random)
    return content


def _place(content: bytes, random: Random) -> int:
    reach = random.choice((32, 600, 3000, len(content)))
    return random.randrange(max(1, min(reach, len(content))))


def _flip(content: bytes, random: Random) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 4, 40)) if content else 0):
        changed[_place(content, random)] ^= 1 << random.randrange(8)
    return bytes(changed)


def _truncate(content: bytes, random: Random) -> bytes:
    return content[: random.choice((_place(content, random), max(0, len(content) - random.randrange(40))))]


def _splice(content: bytes, random: Random) -> bytes:
    start, other = _place(content, random), _place(content, random)
    part = content[other : other + random.randrange(1, 200)]
    return content[:start] + part + content[start + random.choice((0, len(part))) :]


def _length(content: bytes, random: Random) -> bytes:
    """Another number where a count, a length, a size, a type or an offset may lie."""
    lengths = [at for at in range(min(len(content) - 8, 4000)) if content[at + 4 : at + 8] == bytes(4)]
    at = random.choice((8, 16, *lengths)) if random.random() < 0.8 else _place(content, random)
    number, size = random.choice(_LENGTHS), random.choice((4, 8))
    old = int.from_bytes(content[at : at + size], "little")
    number = random.choice((number, old + 1, max(0, old - 1), 2 * old)) & (1 << 8 * size) - 1
    return content[:at] + struct.pack("<Q", number)[:size] + content[at + size :]


def _append(content: bytes, random: Random) -> bytes:
    return content + random.randbytes(random.choice((1, 32, 100_000)))


_MUTATIONS = (_flip, _flip, _truncate, _splice, _length, _length, _length, _append)


def read_all(path: Path) -> str:
    """Reads a file and all its arrays; the error line, or nothing."""
    try:
        for value in GgufFile.read(path).metadata.values():
            if isinstance(value, MetadataArray):
                assert len(value.items()) == value.count
    except CheckpointError as error:
        return str(error)
    except ValueError as error:  # of a text in an array
        return f"{path}: {error}"
    return ""


def open_model(path: Path) -> str:
    """Opens a file as weights, and reads what is small; the error line, or nothing."""
    try:
        with opened_weights(path) as directory:
            check_layout(directory)
            find_weights(directory)
    except CheckpointError as error:
        return str(error)
    return ""


def failures(seed: int, count: int, *, of_models: bool = False) -> list[str]:
    """What went wrong with mutations of small_file(); each line names the seed and the number of its mutation.

    of_models: of tiny_gguf().
    """
    found, read = [], open_model if of_models else read_all
    with tempfile.TemporaryDirectory() as folder:
        whole = (tiny_gguf if of_models else small_file)(Path(folder) / "small.gguf")
        original, path = whole.read_bytes(), Path(folder) / "mutated.gguf"
        assert read(whole) == ""
        for number in range(count):
            content = mutated(original, Random(f"{seed}/{number}"))
            path.write_bytes(content)
            tracemalloc.reset_peak()
            before, started = tracemalloc.get_traced_memory()[0], time.process_time()
            try:
                line = read(path)
                problem = "" if not line or (line.startswith(folder) and "\n" not in line) else f"says {line!r}"
            except Exception as error:
                problem = f"raises {type(error).__name__}: {error}"
            grown = tracemalloc.get_traced_memory()[1] - before
            problem = problem or (f"takes {grown >> 20} MiB" if grown > len(content) + MAX_BYTES else "")
            if (seconds := time.process_time() - started) > _SECONDS:
                problem = problem or f"takes {seconds:.1f} s"
            if problem:
                found.append(f"seed {seed}, mutation {number}: {problem}")
    return found


def main() -> int:
    """Exit codes: 0 no failure, 1 some, one a line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--models", action="store_true", help="open them as weights")
    options = parser.parse_args()
    tracemalloc.start()
    found = failures(options.seed, options.count, of_models=options.models)
    print("\n".join(found) or f"{options.count} mutated files: each was read or refused with one line")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
