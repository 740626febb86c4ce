"""A GGUF file in place of a weights directory: which files a path stands for, and what is read from them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from app.serving.weights_snapshot import without_links
from model.checkpoint import gguf_files
from model.checkpoint.chat_template_file import read_chat_template
from model.checkpoint.checkpoint import load
from model.checkpoint.gguf_directory import choose_files, find_gguf, gguf_notes, made_files, opened_weights
from model.checkpoint.hub import hub_model, resolve_weights
from model.checkpoint.manifest import check_manifest
from model.checkpoint.stored_weights import find_weights
from model.checkpoint.tensor_index import check_layout
from model.files import CheckpointError, sha256
from model.gguf.gguf_file import GgufFile
from model.gguf.metadata_reader import MetadataReader
from model.tokenizer import gguf_tokenizer, gguf_vocabulary
from model.tokenizer.tokenizer import Tokenizer
from model.weights_version import WeightsVersion
from tests.support.loaded_modules import not_matched, repository_modules
from tests.support.model.gguf_files import write_gguf
from tests.support.model.tiny_gguf import TEMPLATE, tiny_gguf, tiny_series


def _touch(folder: Path, *names: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(b"")
    return folder


def test_a_file_has_what_a_weights_directory_has(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    original = tmp_path / "original of tiny"
    with opened_weights(path) as directory:
        check_layout(directory)
        assert not check_manifest(directory)
        tokenizer, template = Tokenizer.load(directory), read_chat_template(directory)
        found = load(directory, device=torch.device("cpu"), dtype=torch.float32)
        assert isinstance(directory, WeightsVersion) and directory.path == tmp_path
    expected = load(original, device=torch.device("cpu"), dtype=torch.float32)
    assert found.weights.config == expected.weights.config and found.weights.packed
    assert found.weights.eos_ids == expected.weights.eos_ids and found.weights.bos_id == expected.weights.bos_id
    assert found.weights.version == sha256(path)
    for name, tensor in expected.decoder.state_dict().items():
        assert torch.allclose(found.decoder.state_dict()[name], tensor, atol=0.03), name
    assert template and template.source == TEMPLATE
    text = "Who are you? asked the owl, caf\u00e9 in claw."
    assert tokenizer.encode(text) == Tokenizer.load(original).encode(text)


def test_made_files_end_with_the_block(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf")
    with opened_weights(path):  # loads what is loaded once
        pass
    before = set(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else set()  # noqa: PTH112, PTH208
    with opened_weights(path) as directory:
        assert isinstance(directory, WeightsVersion)
        paths = [path for name, path in directory.files.items() if not name.endswith(".gguf")]
        assert all(Path(path).read_bytes() for path in paths)
    assert not any(Path(path).exists() for path in paths)
    assert not before or set(os.listdir("/proc/self/fd")) == before  # noqa: PTH208
    assert {path.name for path in tmp_path.iterdir()} == {"tiny.gguf", "original of tiny"}


def test_a_directory_is_itself(tmp_path: Path) -> None:
    with opened_weights(tmp_path) as directory:
        assert directory == tmp_path


def test_a_series_is_one_model_by_any_of_its_files_or_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "series"
    folder.mkdir()
    paths = tiny_series(folder, 3)
    for given in (*paths, folder):
        assert find_gguf(given) == paths
    with opened_weights(folder) as directory:
        weights = find_weights(directory)
    assert len(weights.hashes) == 3
    alone = tiny_gguf(tmp_path / "alone.gguf")
    with opened_weights(alone) as directory:
        assert find_weights(directory).tensors.keys() == weights.tensors.keys()


def test_a_series_must_be_complete_and_in_order(tmp_path: Path) -> None:
    first, second = tiny_series(tmp_path)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(CheckpointError, match=r"lacks tiny-00002-of-00002\.gguf: 1 of 2 files are missing"):
        find_gguf(first)
    second.write_bytes(first.read_bytes())
    wrong = "is part 0 of 2, counted from 0; its name says part 1 of 2"
    with pytest.raises(CheckpointError, match=wrong), opened_weights(first):
        pass
    second.write_bytes(kept)
    lone = first.rename(tmp_path / "lone.gguf")
    wrong = r"is part 0 of 2.*use the names NAME-00001-of-00002\.gguf"
    with pytest.raises(CheckpointError, match=wrong), opened_weights(lone):
        pass


@pytest.mark.parametrize("name", ["x-00001-of-00000.gguf", "x-00003-of-00002.gguf", "x-00000-of-00002.gguf"])
def test_a_name_of_no_series_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointError, match=f"{name}: its name says that it is a file of a series"):
        find_gguf(_touch(tmp_path, name) / name)


def test_a_folder_stands_for_its_only_model(tmp_path: Path) -> None:
    folder = _touch(tmp_path / "a", "x.Q4_0.gguf", "mmproj-x.gguf", "README.md", ".hidden.gguf")
    assert find_gguf(folder) == [folder / "x.Q4_0.gguf"]
    assert gguf_notes(folder) == [f"{folder}: mmproj-x.gguf is left out: only text is served"]
    _touch(folder, "x.Q8_0.gguf")
    with pytest.raises(CheckpointError, match=r"has 2 models \(x.Q4_0.gguf, x.Q8_0.gguf\): give the path of one"):
        find_gguf(folder)
    assert find_gguf(folder / "x.Q8_0.gguf") == [folder / "x.Q8_0.gguf"]
    assert find_gguf(_touch(tmp_path / "b", "config.json")) == [] == find_gguf(tmp_path / "none")


def test_safetensors_win_in_a_folder_with_both(tmp_path: Path) -> None:
    folder, lines = _touch(tmp_path / "both", "model.safetensors", "x.gguf"), list[str]()
    assert find_gguf(folder) == [] and find_gguf(folder / "x.gguf") == [folder / "x.gguf"]
    assert resolve_weights(folder, lines.append) == folder
    assert lines == [f"{folder}: its safetensors are used, not x.gguf; give the path of that file to use it"]


def test_links_lead_to_the_file(tmp_path: Path) -> None:
    path = tiny_gguf(_touch(tmp_path / "far") / "tiny.gguf")
    (tmp_path / "link.gguf").symlink_to(path)
    with opened_weights(tmp_path / "link.gguf") as directory:
        assert find_weights(directory).version == sha256(path)


def test_links_in_a_circle_are_named(tmp_path: Path) -> None:
    path = tmp_path / "loop.gguf"
    path.symlink_to(path)
    (tmp_path / "one.gguf").symlink_to(tmp_path / "two.gguf")
    (tmp_path / "two.gguf").symlink_to(tmp_path / "one.gguf")
    for link in (path, tmp_path / "one.gguf"):
        with pytest.raises(CheckpointError, match=f"^{link}: cannot be read .links in a circle"), opened_weights(link):
            pass
        assert without_links(link) is not None


@pytest.mark.parametrize("kind", ["Q8_0", "F32"])
def test_a_file_that_shrinks_was_replaced(tmp_path: Path, kind: str) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf", kind)
    with opened_weights(path) as directory:
        weights = find_weights(directory)
        content, numbers = path.read_bytes(), min(tensor.start for tensor in GgufFile.read(path).tensors.values())
        for n_bytes in (0, 100, numbers):
            path.write_bytes(content[:n_bytes])
            with pytest.raises(CheckpointError, match=f"^{path}: was replaced while it was read"):
                weights.read("blocks.0.mlp.down.weight", "float32")


def test_factors_of_a_rotation_in_a_file_that_shrinks_were_replaced(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "a.gguf", "llama", {}, {"rope_freqs.weight": torch.ones(4).numpy()})
    file = GgufFile.read(path)
    for content in (b"", path.read_bytes()[:-20], b"GGUF" + bytes(4096)):
        path.write_bytes(content)
        with pytest.raises(CheckpointError, match=f"^{path}: was replaced while it was read"):
            MetadataReader(architecture="llama", files=(file,), tensors=file.tensors).floats("rope_freqs.weight")


def test_the_tokenizer_is_read_once_and_kept_by_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that is replaced meanwhile is another one, also if it begins alike."""
    path, keys, calls = tiny_gguf(tmp_path / "tiny.gguf"), list[str](), list[object]()
    other = path.read_bytes().replace(b"message['content']", b"message['CONTENT']")
    assert len(other) == path.stat().st_size and other != path.read_bytes()

    def remember(key: str, make: Callable[[], dict[str, bytes]]) -> dict[str, bytes]:
        keys.append(key)
        return make()

    read = gguf_vocabulary.read_vocabulary
    for module in (gguf_files, gguf_tokenizer):
        monkeypatch.setattr(module, "read_vocabulary", lambda metadata: (calls.append(metadata), read(metadata))[1])
    first = made_files([path], remember)
    assert made_files([path], remember) == first and len(calls) == 2
    model = gguf_files.GgufModel.read([path])
    path.write_bytes(other)
    monkeypatch.setattr(gguf_files.GgufModel, "read", lambda _paths: model)
    assert made_files([path], remember) == first
    monkeypatch.undo()
    assert made_files([path], remember) != first
    assert keys[0] == keys[1] == keys[2] != keys[3]


def test_kept_tokenizers_depend_on_all_code_that_makes_them() -> None:
    others = {
        "model/__init__.py": "is empty of code",
        "model/files.py": "reads files, and names errors",
        "model/number_formats.py": "numbers of weights",
        "model/weights_version.py": "paths of files",
    }
    loaded = repository_modules("model.tokenizer.gguf_tokenizer", "model.gguf.gguf_file")
    assert not_matched(loaded, gguf_files.SOURCES) - others.keys() == set()


def test_a_file_without_the_suffix_names_the_remedy(tmp_path: Path) -> None:
    path = tiny_gguf(tmp_path / "tiny.gguf").rename(tmp_path / "sha256-0123")
    with pytest.raises(CheckpointError, match=f"must end with .gguf: make such a name with ln {path} NAME.gguf"):
        check_layout(path)
    os.link(path, tmp_path / "name.gguf")
    assert find_gguf(tmp_path / "name.gguf") == [tmp_path / "name.gguf"]


@pytest.mark.parametrize("content", [b"", b"GGUF", b"not a model" * 100])
def test_damaged_files_are_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"^{path}: is "), opened_weights(path):
        pass
    with pytest.raises(CheckpointError, match=r"none\.gguf: cannot be read"), opened_weights(tmp_path / "none.gguf"):
        pass


def test_a_file_without_a_tokenizer_is_named(tmp_path: Path) -> None:
    sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 64}
    sizes |= {"attention.head_count": 4, "attention.layer_norm_rms_epsilon": 1e-5}
    tensors = {"token_embd.weight": torch.zeros(9, 32).numpy()}
    metadata = {f"llama.{name}": size for name, size in sizes.items()}
    path = write_gguf(tmp_path / "bare.gguf", "llama", metadata, tensors)
    with pytest.raises(CheckpointError, match=f"^{path}: .*tokenizer"), opened_weights(path):
        pass


_NAMES = [
    "x-Q4_K_M.gguf",
    "x-Q4_K_S.gguf",
    "x.IQ4_XS.gguf",
    "x-UD-Q4_K_XL.gguf",
    "BF16/x-BF16-00001-of-00002.gguf",
    "BF16/x-BF16-00002-of-00002.gguf",
    "mmproj-F16.gguf",
    "config.json",
]


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ("Q4_K_M", _NAMES[:1]),
        ("q4_k_s", _NAMES[1:2]),
        ("IQ4_XS", _NAMES[2:3]),
        ("Q4_K_XL", _NAMES[3:4]),
        ("UD-Q4_K_XL", _NAMES[3:4]),
        ("BF16", _NAMES[4:6]),
        ("x-Q4_K_M", _NAMES[:1]),
    ],
)
def test_a_quantization_names_one_model_of_a_repository(quantization: str, expected: list[str]) -> None:
    assert choose_files(_NAMES, quantization) == expected


@pytest.mark.parametrize(("quantization", "words"), [("Q4_K", "no GGUF file of Q4_K"), ("", "5 GGUF files that fit")])
def test_other_quantizations_list_the_choices(quantization: str, words: str) -> None:
    with pytest.raises(ValueError, match=f"has {words}; add one of these after a colon: BF16, IQ4_XS, Q4_K_M, Q4_K_S"):
        choose_files(_NAMES, quantization)
    with pytest.raises(ValueError, match="no GGUF file"):
        choose_files(["mmproj.gguf", "config.json"], quantization)
    assert choose_files(["only.gguf"], "") == ["only.gguf"]


@pytest.mark.parametrize("name", ["org/name:", "org/name:.", "org/name:-x"])
def test_a_colon_needs_a_quantization(name: str) -> None:
    with pytest.raises(CheckpointError, match=f"^{name}: has no quantization after the colon, such as org/name:Q4_K_M"):
        hub_model(name)


def test_names_with_a_quantization_are_models_of_the_hub() -> None:
    found = hub_model("org/name@v2:Q4_K_M")
    assert found and (found.repository, found.revision, found.quantization) == ("org/name", "v2", "Q4_K_M")
    assert str(found) == "org/name@v2:Q4_K_M" and str(hub_model("org/name:Q8_0")) == "org/name:Q8_0"
