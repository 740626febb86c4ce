"""python -m app check DIR: validates a weights directory by loading it, and prints its facts."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

import torch

from app.chat.template_client import ChatTemplate
from app.common.ipc import Ready, WorkerConfig
from app.common.settings import Settings
from app.engine.backends import parameter_bytes
from app.engine.cpu.packed_decoder import BLOCK
from app.engine.memory.memory_plan import CacheShape, cache_share_on_cpu
from app.engine.startup import TOKENS_PER_STEP, build_engine
from app.tokenization.tokenizer_trial import check_vocabulary, try_tokenizer
from model.cache_formats import KvCache
from model.checkpoint.checkpoint import load
from model.checkpoint.config_file import load_config
from model.checkpoint.gguf_directory import is_model_file, opened_weights, series_stem
from model.checkpoint.golden import GOLDEN_FILE
from model.checkpoint.golden_export import golden_loss, verify
from model.checkpoint.hub import resolve_weights, source_of
from model.checkpoint.manifest import check_manifest, read_model_name
from model.checkpoint.model_summary import Line, cost_lines, memory_lines, shape_lines
from model.checkpoint.stored_weights import StoredWeights
from model.checkpoint.tensor_index import check_layout
from model.command_line import OneLineParser
from model.config import ModelConfig
from model.files import CheckpointError, linked_caches, one_line, unfinished_run
from model.nn.transformer import Decoder
from model.parameter_shapes import parameter_shapes
from model.quantize import PackedWeights, QuantizedKind, QuantizedWeights, describe_unquantized
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import Directory, WeightsVersion

_CONTEXT = 512


def main(argv: Sequence[str]) -> int:
    """Exit codes: 0 valid, 2 invalid, with one line that names the file and the reason."""
    parser = build_parser()
    given = parser.parse_args(argv).directory
    if not given:
        parser.error("DIR is empty: use . for the current directory")
    try:
        directory = resolve_weights(given, _print_stderr)
        with opened_weights(directory) as opened:
            lines = _check(directory, opened)
    except ValueError as error:  # CheckpointError and TokenizerError among others; all messages name the file
        print(f"error: {one_line(str(error))}", file=sys.stderr)
        return 2
    print(one_line(f"{directory}: valid"))
    for label, text in lines:
        print(f"  {label:<13}{one_line(text)}")
    if command := unfinished_run(directory):
        print(f"  {'training':<13}unfinished: --resume continues it: {one_line(command)}")
    return 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of this verb."""
    parser = OneLineParser(prog="inkstream check", description="Validate a weights directory.")
    parser.add_argument(
        "directory",
        metavar="DIR",
        help="weights directory, GGUF file, or a model of the Hub: org/name[@revision]",
    )
    return parser


def _check(given: Path, directory: Directory) -> list[Line]:
    """Facts of a valid directory, which is `given` or made from it. Raises ValueError with the file and the reason."""
    check_layout(directory)
    template = ChatTemplate.load(directory)
    if template and (problem := asyncio.run(template.problem())):
        raise CheckpointError(problem)
    ready = _start_engine(given, directory)
    gc.collect()  # the engine's weights
    checkpoint = load(directory, device=torch.device("cpu"), dtype=torch.float32)
    decoder, weights = checkpoint.decoder, checkpoint.weights
    with _without_stderr():  # the tokenizers library writes to stderr when it panics
        tokenizer = try_tokenizer(directory)
    check_vocabulary(directory, tokenizer, decoder.config.vocab_size)
    difference = verify(decoder, directory)
    is_whole = check_manifest(directory, weights.hashes)
    quantize_lines = list(_quantize_lines(weights, decoder, directory))
    defaults = ready.sampling_defaults
    return [
        ("name", read_model_name(directory) or _own_name(given)),
        ("family", weights.family.name),
        *_file_lines(weights),
        *shape_lines(decoder.config),
        *memory_lines(decoder.config, decoder.n_params, context_bytes(decoder.config)),
        *cost_lines(decoder.config),
        ("mem_limit", _memory_limits(decoder.config, decoder.n_params)),
        ("contexts", describe_contexts(decoder.config, decoder.n_params)),
        *_coded_contexts(decoder.config, decoder.n_params),
        *_tokenizer_lines(weights, tokenizer),
        ("chat", "no template" if template is None else "has a template"),
        ("defaults", ", ".join(f"{name} {value:g}" for name, value in defaults.items()) or "the model brings none"),
        ("golden", "none" if difference is None else f"passed, largest difference {difference:.1e}"),
        *quantize_lines,
        ("manifest", "passed" if is_whole else "none"),
        *(("links", f"{count} files are in the cache {cache}") for cache, count in linked_caches(given).items()),
        ("version", weights.version),
        *([("commit", f"{source.commit} of {source.repository}")] if (source := source_of(given)) else []),
    ]


def _own_name(given: Path) -> str:
    return series_stem(given.name) if is_model_file(given.name) else given.resolve().name


def _file_lines(weights: StoredWeights) -> list[Line]:
    """What of the files is read in another way than it is stored, or not at all."""
    lines = []
    if wrapper := weights.family.wrapper:
        counts = Counter(re.match(r"(?:model\.)?[^.]+", name)[0] for name in weights.left_out)  # type: ignore[index]
        parts = ", ".join(f"{count:,} tensors of {module}" for module, count in counts.items()) or "nothing"
        lines.append(("text of", f"{wrapper.name}; left out: {parts}"))
    if weights.scales:
        lines.append(("fp8", f"{len(weights.scales):,} matrices, times their scales, rounded to bfloat16"))
    if weights.packed:
        kinds = Counter(packed.format.describe() for packed in weights.packed.values())
        matrices = ", ".join(f"{count:,} matrices of {kind}" for kind, count in kinds.items())
        lines.append(("packed", f"{matrices}; {_bits_per_weight(weights, weights)} with all others in bfloat16"))
    return lines


def _bits_per_weight(weights: StoredWeights, served: PackedWeights) -> str:
    n_bytes = parameter_bytes(served, parameter_shapes(weights.config), "bfloat16", ())
    return f"{8 * n_bytes / weights.n_params:.3g} bits per weight"


_QUANTIZED_TO_MEASURE = 1 << 29
"""Parameters of a model that check quantizes: more would take minutes."""


def _quantize_lines(weights: StoredWeights, decoder: Decoder, directory: Directory) -> Iterator[Line]:
    """Bits per weight, and the loss on the text of golden.json, with each value of --quantize that packs matrices.

    Changes the decoder.
    """
    shapes = parameter_shapes(weights.config)
    for kind in get_args(QuantizedKind):
        served = QuantizedWeights(weights, weights.config, kind)
        if all(weights.packed_formats(name) for name in shapes if served.packed_formats(name)):
            continue  # what files have packed stays as it is
        text, loss = _bits_per_weight(weights, served), None
        if weights.n_params <= _QUANTIZED_TO_MEASURE:
            try:
                for name in shapes:
                    if served.packed_formats(name):
                        decoder.get_parameter(name).data = torch.from_numpy(served.read(name, "float32"))
            except ValueError as error:
                yield kind, str(error)
                continue
            loss = golden_loss(decoder, directory)
        measured = "" if loss is None else f", {loss:+.2%} bits per byte of {GOLDEN_FILE}"
        unquantized = describe_unquantized(weights.config, kind)
        yield kind, f"{text}{measured}" + (f"; {unquantized}" if unquantized else "")


_PROCESSES = 768 << 20
"""Bytes of all processes without weights and cache: measured 0.6 GB with torch, and what requests may buffer."""
_SECOND_ENGINE = 384 << 20


def _memory_limits(shape: ModelConfig, n_params: int) -> str:
    """The memory that a container needs to serve the model on a CPU with the default settings.

    The service takes at most half of the memory that is free for its cache, so twice the cache must fit.
    """
    found: dict[str, tuple[int, int]] = {}
    for dtype, size in _ITEM_BYTES.items():
        cache = _cache_shape(shape, dtype)
        running = cache.max_running
        engine = n_params * size + 2 * cache.cache_bytes(cache.counts(cache.needed_blocks * running, running))
        found[dtype] = _PROCESSES + engine, _PROCESSES + _SECOND_ENGINE + 2 * engine
    serving, reloading = (
        " or ".join(f"{-(-sizes[i] >> 20)}m in {dtype}" for dtype, sizes in found.items()) for i in (0, 1)
    )
    return f"{serving} on a CPU, with --max-running {_MAX_RUNNING}; with reloads {reloading}"


_ITEM_BYTES = {"float32": 4, "bfloat16": 2}
_MAX_RUNNING: int = Settings.model_fields["max_running"].default


def _cache_shape(shape: ModelConfig, dtype: str, kv_cache: KvCache = "auto") -> CacheShape:
    """The caches of a service on a CPU with the default settings and the model's context."""
    return CacheShape(
        shape=shape,
        context=shape.context,
        block_size=BLOCK,
        max_running=_MAX_RUNNING,
        dtype=dtype,
        kv_cache=kv_cache,
        tokens_per_step=TOKENS_PER_STEP,
    )


def context_bytes(shape: ModelConfig) -> dict[str, int]:
    """Bytes of the keys and values of a sequence of maximal length, for each number format."""
    return {dtype: _cache_shape(shape, dtype).sequence_bytes for dtype in _ITEM_BYTES}


_MEMORIES = (8, 16, 24, 80)
"""GiB of free memory."""


def _coded_contexts(shape: ModelConfig, n_params: int) -> list[Line]:
    """The contexts with --kv-cache int8, if it serves this model."""
    return [] if shape.n_encoder_layers else [("kv_int8", describe_contexts(shape, n_params, "int8"))]


def describe_contexts(shape: ModelConfig, n_params: int, kv_cache: KvCache = "auto") -> str:
    """The default context of a service in bfloat16 on a CPU with so much free memory."""
    whole = _cache_shape(shape, "bfloat16", kv_cache)
    if shape.n_encoder_layers:
        whole = replace(whole, max_running=1)
    found = []
    for gib in _MEMORIES:
        share = cache_share_on_cpu((gib << 30) - _PROCESSES, 2 * n_params)
        fitting = whole.fitting(share)
        context = fitting.context if fitting.least_cache_bytes <= share else 0
        found.append(f"{f'{context:,}' if context else 'none'} in {gib} GiB")
    cache = "" if kv_cache == "auto" else f" with --kv-cache {kv_cache}"
    return f"{', '.join(found)} of free memory, in bfloat16{cache}"


def _print_stderr(line: str) -> None:
    print(one_line(line), file=sys.stderr, flush=True)


def _start_engine(given: Path, directory: Directory) -> Ready:
    """Starts an engine in this process to test the weights, and drops it. Raises ValueError.

    It runs in float32 on the CPU, for one sequence of a short context, which takes little memory besides the weights.
    """
    context = min(load_config(directory).context, _CONTEXT)
    version = directory if isinstance(directory, WeightsVersion) else None
    config = WorkerConfig(weights=str(given), device="cpu", dtype="float32", kernels="torch", max_running=1,
                          max_context=context, version=version)  # fmt: skip
    return build_engine(config).ready


@contextlib.contextmanager
def _without_stderr() -> Iterator[None]:
    """Redirects file descriptor 2 to /dev/null inside the block."""
    stderr, devnull = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, 2)
    try:
        yield
    finally:
        os.dup2(stderr, 2)
        for descriptor in (stderr, devnull):
            os.close(descriptor)


def _tokenizer_lines(weights: StoredWeights, tokenizer: Tokenizer) -> list[Line]:
    def names(ids: Iterable[int]) -> str:
        return ", ".join(f"{token} {json.dumps(tokenizer.piece(token))}" for token in ids) or "none"

    bos = tokenizer.start_id(weights.bos_id)
    ends = tokenizer.end_ids(weights.eos_ids)
    others = [token for token in tokenizer.chat_end_ids(weights.named_eos_ids) if token not in ends]
    bos_rule = "added to a prompt" if tokenizer.adds_bos else "not added to a prompt"
    return [
        ("tokenizer", f"{tokenizer.kind}, {tokenizer.vocab_size} of {weights.config.vocab_size} tokens"),
        *([("speed", "not proven: texts are tokenized in sandboxed processes")] if tokenizer.unproven else []),
        ("BOS", "none" if bos is None else f"{names((bos,))}, {bos_rule}"),
        ("EOS", names(ends)),
        *([("EOS of chats", f"also {names(others)}: the files name different tokens")] if others else []),
    ]
