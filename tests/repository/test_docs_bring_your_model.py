"""docs/bring-your-model.md matches the code: its scripts convert a nanoGPT, its tables are complete."""

from __future__ import annotations

import json
import pickle
import re
import runpy
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GPT2LMHeadModel

from app.cli.check import main as check
from model.checkpoint.checkpoint import load
from model.families.registry import SUPPORTED, read_config
from model.nn.reference import logits
from model.nn.transformer import Decoder
from model.presets import preset
from tests.support import ROOT
from tests.support.completion_client import whole
from tests.support.servers import start_server, stop_server

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/bring-your-model.md").read_text()
SCRIPTS = {
    name: body for body, name in re.findall(r'^```python\n("""(\w+\.py) .*?)^```', PAGE, re.MULTILINE | re.DOTALL)
}
CHARACTERS = "\n !,.:EMORabcdefghijklmnopqrstuvwxyz\u00e9\u2014\U0001f98a"
CONTEXT = 48


class NanoBlock(nn.Module):
    def __init__(self, width: int, heads: int, bias: bool) -> None:
        super().__init__()
        self.heads = heads
        self.ln_1, self.ln_2 = nn.LayerNorm(width, bias=bias), nn.LayerNorm(width, bias=bias)
        linear = {"c_attn": nn.Linear(width, 3 * width, bias), "c_proj": nn.Linear(width, width, bias)}
        self.attn = nn.ModuleDict(linear)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 4 * width, bias), "c_proj": nn.Linear(4 * width, width, bias)}
        )

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.attn.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.attn.c_proj(y)
        return x + self.mlp.c_proj(F.gelu(self.mlp.c_fc(self.ln_2(x))))


class NanoGPT(nn.Module):
    """With the names of karpathy/nanoGPT."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        size = len(CHARACTERS)
        self.args = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": CONTEXT, "bias": bias, "vocab_size": size}
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(size, 32),
                "wpe": nn.Embedding(CONTEXT, 32),
                "h": nn.ModuleList(NanoBlock(32, 4, bias) for _ in range(2)),
                "ln_f": nn.LayerNorm(32, bias=bias),
            }
        )
        self.lm_head = nn.Linear(32, size, bias=False)
        self.transformer.wte.weight = self.lm_head.weight
        for parameter in self.parameters():
            nn.init.normal_(parameter, 0.0, 0.5)

    def forward(self, tokens_BN: Tensor) -> Tensor:
        x = self.transformer.wte(tokens_BN) + self.transformer.wpe(torch.arange(tokens_BN.shape[1]))
        for block in self.transformer.h:
            x = block(x)
        return self.lm_head(self.transformer.ln_f(x))


@pytest.fixture(scope="module", params=[True, False], ids=["bias", "no bias"])
def nano(request: pytest.FixtureRequest) -> NanoGPT:
    torch.manual_seed(0)
    return NanoGPT(request.param).requires_grad_(False).eval()


@pytest.fixture
def checkpoint(nano: NanoGPT, tmp_path: Path) -> Path:
    """What nanoGPT saves, torch.compile and the mask of older versions included."""
    state = {f"_orig_mod.{name}": tensor for name, tensor in nano.state_dict().items()}
    state["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, CONTEXT, CONTEXT).tril()
    torch.save({"model": state, "model_args": nano.args, "iter_num": 1}, tmp_path / "ckpt.pt")
    return tmp_path / "ckpt.pt"


def run_script(name: str, *arguments: Path | str) -> None:
    """Runs a script of the page as it stands there."""
    path = Path(arguments[0]).parent / name
    path.write_text(SCRIPTS[name])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(path), *map(str, arguments)])
        runpy.run_path(str(path))


def brought(directory: Path) -> Decoder:
    return load(directory, device=torch.device("cpu"), dtype=torch.float32).decoder


@pytest.mark.parametrize("script", ["export.py", "gpt.py"])
def test_a_nanogpt_brought_by_the_script_has_the_logits_it_was_trained_with(
    nano: NanoGPT, checkpoint: Path, script: str, tmp_path: Path
) -> None:
    run_script(script, checkpoint, tmp_path / "brought")
    for length in (1, 7, CONTEXT):
        tokens_N = torch.randint(len(CHARACTERS), (length,))
        assert torch.allclose(
            logits(brought(tmp_path / "brought"), tokens_N.tolist()), nano(tokens_N[None])[0], atol=1e-4
        )


def test_an_untied_head_is_brought_too(nano: NanoGPT, checkpoint: Path, tmp_path: Path) -> None:
    saved = torch.load(checkpoint, weights_only=True)
    saved["model"]["_orig_mod.lm_head.weight"] = 2 * nano.lm_head.weight
    torch.save(saved, checkpoint)
    run_script("export.py", checkpoint, tmp_path / "brought")
    tokens_N = torch.arange(9)
    assert torch.allclose(logits(brought(tmp_path / "brought"), [*range(9)]), 2 * nano(tokens_N[None])[0], atol=1e-4)


def test_transformers_loads_the_gpt2_layout_too(nano: NanoGPT, checkpoint: Path, tmp_path: Path) -> None:
    run_script("gpt.py", checkpoint, tmp_path / "brought")
    theirs = GPT2LMHeadModel.from_pretrained(tmp_path / "brought").eval()
    tokens_BN = torch.randint(len(CHARACTERS), (2, CONTEXT))
    with torch.inference_mode():
        assert torch.allclose(theirs(tokens_BN).logits, nano(tokens_BN), atol=1e-4)


@pytest.mark.parametrize("nano", [False], indirect=True)
def test_a_nanogpt_of_characters_is_checked_and_served(
    nano: NanoGPT, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "brought"
    run_script("export.py", checkpoint, folder)
    (tmp_path / "meta.pkl").write_bytes(pickle.dumps({"stoi": {c: i for i, c in enumerate(CHARACTERS)}}))
    run_script("chars.py", tmp_path / "meta.pkl", folder)
    assert check([str(folder)]) == 0, capsys.readouterr().err
    assert "#" not in CHARACTERS  # and is left out
    prompt = "ROMEO:\n\u00e9\u2014\U0001f98a, "
    tokens = [CHARACTERS.index(character) for character in prompt]
    for _ in range(20):
        tokens.append(int(nano(torch.tensor([tokens]))[0, -1].argmax()))
    server = start_server(tmp_path, folder, "--dtype", "float32")
    try:
        (answer,) = whole(server.url, prompt=f"#{prompt}", max_tokens=20, temperature=0)["choices"]
    finally:
        assert stop_server(server) == 0
    assert answer["text"] == "".join(CHARACTERS[token] for token in tokens[len(prompt) :])


def test_the_comparison_prints_our_logits(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_script("export.py", checkpoint, tmp_path / "brought")
    run_script("compare.py", tmp_path / "brought")
    assert capsys.readouterr().out == f"{logits(brought(tmp_path / 'brought'), [1, 2, 3])}\n"


def test_the_command_prints_a_config_to_begin_with() -> None:
    (command,) = re.findall(r"^\.venv/bin/python (-c '.*?')$", PAGE, re.MULTILINE | re.DOTALL)
    printed = subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, capture_output=True, check=True).stdout
    assert read_config(json.loads(printed))[1] == preset("textbook")


def test_every_architecture_has_its_row() -> None:
    rows = PAGE[PAGE.index("| you have |") : PAGE.index("## Worked example")]
    assert {name for name in SUPPORTED if f"| `{name}` |" in rows} == set(SUPPORTED)
    for name in ("textbook", "standalone", "toy", "gpt", "cross"):
        assert re.search(rf"`{name}`.*\| `inkstream` \|.*`preset\(\"{name}\"\)`", rows), name


def test_the_table_names_every_tensor_and_no_other() -> None:
    rows = PAGE[PAGE.index("| tensor |") : PAGE.index("A `.bias` is there")]
    documented = {name for row in rows.splitlines() for name in re.findall(r"`(\w[\w.]+)`", row.split(" | ")[0])}
    shapes = [replace(preset(name), qk_norm=True, final_norm=True) for name in ("small", "gpt", "cross")]
    with torch.device("meta"):
        names = {re.sub(r"\d+", "N", name) for shape in shapes for name in Decoder(shape).state_dict()}
    inside = {name for name in names if name.startswith("encoder_blocks.N.")}
    assert {name.removeprefix("encoder_") for name in inside} < names
    assert {name.replace(".bias", ".weight") for name in names - inside} == documented - {"encoder_blocks.N."}
