"""What a run will take, before it takes it: --dry-run. Reads the text and times a few micro-batches; writes nothing."""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from pathlib import Path

import torch

from model.describe import Line, describe_bytes, describe_size
from model.device import choose_device, describe, free_memory
from model.train.init import base_of, settle
from model.train.options import limits, shape
from model.train.place import free_bytes
from model.train.plan.amount import Amount, amount_of
from model.train.plan.sizes import DoesNotFit, Sizes, parts, sizes
from model.train.plan.speed import Speed, measure
from model.train.report.progress import duration
from model.transformer import Decoder

_PASSING = 2
"""Gradients of activations, and what a layer needs only while it computes, are about as much again."""


def forecast(options: argparse.Namespace) -> None:
    """Prints a table. Raises DoesNotFit after it, and what bad input raises."""
    device, base = choose_device(options.device), base_of(options, Path(options.out), resumes=False)
    if base:
        settle(options, base)
    asked = base.shape if base else shape(options)
    amount = amount_of(options, options.context or asked.context, base.tokenizer if base else None)
    asked = asked if base else replace(asked, vocab_size=amount.vocab_size)
    with torch.device("meta"):
        decoder = Decoder(asked)
    need = sizes(decoder, options.optimizer, ema=options.ema, export_dtype=options.export_dtype)
    _print([("parameters", _parameters(decoder)), ("text", amount.told)])
    on_disk, free = need.on_disk + amount.stored, free_bytes(Path(options.out))
    _print([("disk", f"about {describe_bytes(on_disk)}: {_disk(need, amount)}; {describe_bytes(free)} are free")])
    if on_disk > free:
        raise DoesNotFit(f"--out {options.out}: its disk has too little room; name a folder elsewhere")
    in_memory, free = need.in_memory, free_memory(device)
    told = _memory(need)
    if in_memory < free:
        speed = measure(asked, options, device, math.ceil(amount.row_tokens))
        _print(_run_lines(options, amount, speed, device))
        in_memory += _PASSING * speed.activations
        told += f", activations of {speed.micro_rows} windows at once {describe_bytes(speed.activations)}"
    _print([("memory", f"about {describe_bytes(in_memory)}: {told}; {describe_bytes(free)} are free")])
    if in_memory > free:
        raise DoesNotFit("there is too little memory; take a smaller --preset, --context or --micro-windows")
    print("it fits; nothing was written. Without --dry-run it begins", flush=True)


def steps_of(options: argparse.Namespace, amount: Amount, step_seconds: float) -> int:
    """Until the first of the limits is reached."""
    rows = options.windows
    epochs, tokens = rows / amount.per_epoch, rows * amount.row_tokens
    share = limits(options).done(step=1, epochs=epochs, tokens=tokens, seconds=step_seconds)
    return math.ceil(1 / share - 1e-6)


def _print(lines: list[Line]) -> None:
    for what, text in lines:
        print(f"{what:11} {text}", flush=True)


def _run_lines(options: argparse.Namespace, amount: Amount, speed: Speed, device: torch.device) -> list[Line]:
    seconds = speed.step_seconds(options.windows)
    steps, per_step = steps_of(options, amount, seconds), round(options.windows * amount.row_tokens)
    epochs = steps * options.windows / amount.per_epoch
    return [
        ("steps", f"{steps} of {per_step} tokens: {steps * per_step / 1e6:.2f} M tokens, {epochs:.2f} epochs"),
        ("speed", f"{per_step / seconds:.0f} tokens/s on {describe(device)}, as a few micro-batches went"),
        ("time", f"about {duration(steps * seconds)}, and what measuring and saving take"),
    ]


def _parameters(decoder: Decoder) -> str:
    listed = ", ".join(f"{name} {describe_size(n)}" for name, n in parts(decoder).items())
    return f"{describe_size(decoder.n_params)}: {listed}"


def _memory(need: Sizes) -> str:
    found = {"weights": need.weights, "gradients": need.gradients, "optimiser": need.optimiser, "average": need.average}
    return ", ".join(f"{name} {describe_bytes(size)}" for name, size in found.items() if size)


def _disk(need: Sizes, amount: Amount) -> str:
    tokens = [f"tokens {describe_bytes(amount.stored)}"] * (amount.stored > 0)
    return ", ".join(
        [*tokens, f"snapshots {describe_bytes(2 * need.snapshot)}", f"result {describe_bytes(need.result)}"]
    )
