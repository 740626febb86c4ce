"""docs/bring-your-model.md matches the code: its scripts convert a nanoGPT, its tables are complete."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from app.__main__ import main as inkstream
from model.checkpoint.checkpoint import load
from model.config import Experts
from model.families.registry import MODEL_TYPES, read_config
from model.gguf.architectures import ARCHITECTURES
from model.gguf.blocks import PACKED_FORMATS
from model.nn.reference import logits
from model.nn.transformer import Decoder
from model.presets import preset
from tests.support import ROOT
from tests.support.completion_client import fetch_completion
from tests.support.docs_commands import commands_of, fences
from tests.support.lazy_modules import transformers
from tests.support.servers import running_server
from tests.tools.families import with_table

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/bring-your-model.md").read_text()
SCRIPTS = {
    name: body for body, name in re.findall(r'^```python\n("""(\w+\.py) .*?)^```', PAGE, re.MULTILINE | re.DOTALL)
}
TYPED = next(typed for typed in map(commands_of, fences(PAGE)) if any("convert out/ckpt.pt" in line for line in typed))
"""The commands that convert a nanoGPT, check it, and serve it."""
CHARACTERS = "\n !,.:EMORabcdefghijklmnopqrstuvwxyz\u00e9\u2014\U0001f98a"
CONTEXT = 48


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no bias"])
def nano(request: pytest.FixtureRequest) -> nn.Module:
    """A nanoGPT as in karpathy/nanoGPT: GPT-2 with the exact GELU, some without biases."""
    torch.manual_seed(0)
    sizes = {"n_positions": CONTEXT, "n_embd": 32, "n_layer": 2, "n_head": 4}
    config = transformers.GPT2Config(vocab_size=len(CHARACTERS), activation_function="gelu", **sizes)
    model = transformers.GPT2LMHeadModel(config)
    for name, parameter in model.requires_grad_(False).named_parameters():
        nn.init.normal_(parameter, 0.0, 0.0 if name.endswith(".bias") and not request.param else 0.5)
    return model.eval()


@pytest.fixture
def checkpoint(nano: nn.Module, tmp_path: Path) -> Path:
    """A checkpoint as nanoGPT saves it: transposed linear layers, torch.compile's prefix, an old version's mask."""
    bias = bool(nano.transformer.ln_f.bias.any())
    state = {
        f"_orig_mod.{name}": tensor.T.contiguous() if ".c_" in name and tensor.ndim == 2 else tensor
        for name, tensor in nano.state_dict().items()
        if bias or not name.endswith(".bias")
    }
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
    size = len(CHARACTERS)
    args = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": CONTEXT, "bias": bias, "vocab_size": size}
    torch.save({"model": state, "model_args": args, "iter_num": 1}, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


def run_script(name: str, *arguments: Path | str) -> None:
    """Runs a script of the page exactly as printed."""
    path = Path(arguments[0]).parent / name
    path.write_text(SCRIPTS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path))


def bring(how: str, checkpoint: Path, out: Path) -> None:
    """Converts a checkpoint with a script of the page, or with the command that it names."""
    if how.endswith(".py"):
        run_script(how, checkpoint, out)
    else:
        assert inkstream([how, str(checkpoint), str(out)]) == 0


def brought(directory: Path) -> Decoder:
    return load(directory, device=torch.device("cpu"), dtype=torch.float32).decoder


@pytest.mark.parametrize("how", ["convert", "gpt.py"])
def test_converted_nanogpt_keeps_its_logits(nano: nn.Module, checkpoint: Path, how: str, tmp_path: Path) -> None:
    bring(how, checkpoint, tmp_path / "brought")
    for length in (1, 7, CONTEXT):
        tokens_N = torch.randint(len(CHARACTERS), (length,))
        assert torch.allclose(
            logits(brought(tmp_path / "brought"), tokens_N.tolist()), nano(tokens_N[None]).logits[0], atol=1e-4
        )


def test_untied_head_is_converted(nano: nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    saved["model"]["_orig_mod.lm_head.weight"] = 2 * nano.lm_head.weight
    torch.save(saved, checkpoint)
    bring("convert", checkpoint, tmp_path / "brought")
    tokens_N = torch.arange(9)
    assert torch.allclose(
        logits(brought(tmp_path / "brought"), [*range(9)]), 2 * nano(tokens_N[None]).logits[0], atol=1e-4
    )


def test_transformers_loads_the_gpt2_layout(nano: nn.Module, checkpoint: Path, tmp_path: Path) -> None:
    run_script("gpt.py", checkpoint, tmp_path / "brought")
    theirs = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "brought").eval()
    tokens_BN = torch.randint(len(CHARACTERS), (2, CONTEXT))
    with torch.inference_mode():
        assert torch.allclose(theirs(tokens_BN).logits, nano(tokens_BN).logits, atol=1e-4)


@pytest.mark.parametrize("nano", [False], indirect=True)
def test_character_level_nanogpt_is_checked_and_served(
    nano: nn.Module, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    meta = tmp_path / "data/shakespeare_char/meta.pkl"
    for path in (meta, tmp_path / "out/ckpt.pt"):
        path.parent.mkdir(parents=True)
    shutil.copy(checkpoint, tmp_path / "out/ckpt.pt")
    meta.write_bytes(pickle.dumps({"stoi": {c: i for i, c in enumerate(CHARACTERS)}}))
    monkeypatch.chdir(tmp_path)
    for line in TYPED[:2]:
        assert inkstream(shlex.split(line)[1:]) == 0
    assert "#" not in CHARACTERS  # and is not converted
    prompt = "ROMEO:\n\u00e9\u2014\U0001f98a, "
    tokens = [CHARACTERS.index(character) for character in prompt]
    for _ in range(20):
        tokens.append(int(nano(torch.tensor([tokens])).logits[0, -1].argmax()))
    with running_server(tmp_path, tmp_path / "my-model", "--dtype", "float32") as server:
        (answer,) = fetch_completion(server.url, prompt=f"#{prompt}", max_tokens=20, temperature=0)["choices"]
    assert answer["text"] == "".join(CHARACTERS[token] for token in tokens[len(prompt) :])


def test_comparison_script_prints_our_logits(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bring("convert", checkpoint, tmp_path / "brought")
    capsys.readouterr()
    run_script("compare.py", tmp_path / "brought")
    assert capsys.readouterr().out == f"{logits(brought(tmp_path / 'brought'), [1, 2, 3])}\n"


def test_command_prints_an_initial_config() -> None:
    (command,) = re.findall(r"^\.venv/bin/python (-c '.*?')$", PAGE, re.MULTILINE | re.DOTALL)
    printed = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, check=True).stdout
    assert read_config(json.loads(printed))[1] == preset("textbook")


def test_table_of_families_is_generated() -> None:
    assert with_table(PAGE) == PAGE, "run: python -m tests.tools.families"


def test_every_architecture_has_a_row() -> None:
    rows = PAGE[PAGE.index("| you have |") : PAGE.index("## Worked example")]
    assert {name for name in MODEL_TYPES if f"| `{name}` |" in rows} == set(MODEL_TYPES)
    for name in ("textbook", "standalone", "toy", "gpt", "cross"):
        assert re.search(rf"`{name}`.*\| `inkstream` \|.*`preset\(\"{name}\"\)`", rows), name


def test_table_names_exactly_the_tensors() -> None:
    rows = PAGE[PAGE.index("| tensor |") :].partition("\n\n")[0]
    documented = {name for row in rows.splitlines() for name in re.findall(r"`(\w[\w.]+)`", row.split(" | ")[0])}
    shapes = [replace(preset(name), qk_norm="head", final_norm=True) for name in ("small", "gpt", "cross")]
    shapes += [
        replace(shape, norm_position="sandwich", embedding_norm=not shape.n_encoder_layers, activation="xielu")
        for shape in shapes
    ]
    kinds = tuple(replace(kind, mlp="experts") for kind in shapes[0].layer_kinds)
    experts = Experts(count=4, chosen=2, width=8, choice_bias=True, shared_width=8)
    shapes.append(replace(shapes[0], layer_kinds=kinds, mlp_width=0, experts=experts, sinks=True))
    with torch.device("meta"):
        names = {re.sub(r"\d+", "N", name) for shape in shapes for name in Decoder(shape).state_dict()}
    inside = {name for name in names if name.startswith("encoder_blocks.N.")}
    assert {name.removeprefix("encoder_") for name in inside} < names
    assert {name.replace(".bias", ".weight") for name in names - inside} == documented - {"encoder_blocks.N."}


def test_all_architectures_and_types_of_gguf_files_are_documented() -> None:
    rows = dict(re.findall(r"^\| (types of tensors|`general\.architecture`) \| (.+) \|$", PAGE, re.MULTILINE))
    assert set(re.findall(r"`([^`]+)`", rows["`general.architecture`"])) == ARCHITECTURES.keys()
    named = rows["types of tensors"].partition(": so")[0].replace(";", ",").split(", ")
    assert set(named) == {"F32", "F16", "BF16", *PACKED_FORMATS}
