"""transformers.Trainer on a Llama of the same shape, set up as its documentation shows."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from model.config import ModelConfig


class _Windows(Dataset[dict[str, Tensor]]):
    def __init__(self, inputs_BN: Tensor, steps: int) -> None:
        self.inputs_BN, self.steps = inputs_BN, steps

    def __len__(self) -> int:
        return self.steps * len(self.inputs_BN)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        tokens_N = self.inputs_BN[index % len(self.inputs_BN)]
        return {"input_ids": tokens_N, "labels": tokens_N}


class _StepTimer(TrainerCallback):
    """Reports how long each step took; the callback runs the other trainers before the next step."""

    def __init__(self, on_step: Callable[[float, float], None]) -> None:
        self.on_step, self.started = on_step, (0.0, 0.0)

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.started = time.perf_counter(), time.process_time()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        wall, cpu = self.started
        self.on_step(time.perf_counter() - wall, time.process_time() - cpu)


def train(
    config: ModelConfig,
    inputs_BN: Tensor,
    *,
    micro_batch: int,
    steps: int,
    use_cpu: bool,
    bf16: bool,
    folder: str,
    on_step: Callable[[float, float], None],
) -> None:
    """Runs `steps` steps with Trainer's AdamW, and calls `on_step` with the wall and CPU seconds of each."""
    shape = LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.width,
        num_hidden_layers=config.n_layers,
        num_attention_heads=config.n_heads,
        num_key_value_heads=config.n_kv_heads,
        head_dim=config.head_dim,
        intermediate_size=config.mlp_width,
        max_position_embeddings=config.context,
        rms_norm_eps=config.norm_eps,
        tie_word_embeddings=config.tied_head,
    )
    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=micro_batch,
        gradient_accumulation_steps=len(inputs_BN) // micro_batch,
        use_cpu=use_cpu,
        bf16=bf16,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
    )
    windows = _Windows(inputs_BN, steps)
    Trainer(LlamaForCausalLM(shape), arguments, train_dataset=windows, callbacks=[_StepTimer(on_step)]).train()
