"""Seeded mutations that break a weights directory, given as a dict of its files.

A file is bytes, or an Other: anything but a regular file.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Other:
    """Replaces a file: a fifo, a directory, or a link to `target`."""

    kind: str
    target: str = ""


Files = dict[str, bytes | Other]

_NUMBERS = (0, 1, -1, 2, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32, 10**9, 10**12, 2**53 + 1, 2**63, 10**40, -(10**12))
VALUES = [
    *map(json.dumps, (*_NUMBERS, 0.5, -1.5, 1e-300, 1e300, True, False, None, "", "x", "llama", "gpt2", "\ud800")),
    *map(json.dumps, ("a\nb", "\x1b[2J", "__metadata__", "x" * 10_000)),
    *("NaN", "Infinity", "-Infinity", "1e999", "-0.0", "[]", "{}", "[[]]", '{"a":{"b":[1]}}', "[1,2,3]", "9" * 5000),
    *("[" * 40 + "]" * 40, "[" * 900 + "]" * 900, "[" * 100_000, '{"a":' * 100_000, "nul", "'x'", "//", "0x10", "\x00"),
    *('"\\ud83d"', '"\\u0000"'),
]
"""Well-formed and malformed JSON."""
EVIL_REGEX = ("(a+)+$", "(x?){9999}", "(?<n>a|b\\g<n>c)", "[", "(?i:\\p{L}+)*\\1", "(.*)*(.*)*(.*)*z", "", "\\G+")
_TOKEN = re.compile(r'"(?:[^"\\]|\\.)*"(?P<key>\s*:)?|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?|true|false|null|\[\]|\{\}')


def _choose(rng: Random, files: Files, suffix: str = "") -> tuple[str, bytes]:
    """(name, content) of a random file that is not empty."""
    name = rng.choice(sorted(n for n, c in files.items() if isinstance(c, bytes) and c and n.endswith(suffix)))
    content = files[name]
    assert isinstance(content, bytes)
    return name, content


def _header(content: bytes) -> tuple[bytes, bytes]:
    """(header, tensor data) of a safetensors file."""
    end = 8 + struct.unpack("<Q", content[:8])[0]
    return content[8:end], content[end:]


def _with_header(header: bytes, numbers: bytes) -> bytes:
    return struct.pack("<Q", len(header)) + header + numbers


def flip_bits(rng: Random, files: Files) -> str:
    name, whole = _choose(rng, files)
    content = bytearray(whole)
    # Half of the mutations hit the beginning, where the header is.
    reach = min(len(content), 600) if rng.random() < 0.5 else len(content)
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)
    return name


def cut(rng: Random, files: Files) -> str:
    """Removes the end or a part in the middle."""
    name, content = _choose(rng, files)
    at = rng.choice([0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content))])
    files[name] = content[:at] + (content[at + rng.randint(1, 200) :] if rng.random() < 0.5 else b"")
    return name


def insert(rng: Random, files: Files) -> str:
    name, content = _choose(rng, files)
    at = rng.choice([0, 8, len(content), rng.randrange(len(content))])
    junk = rng.choice([rng.randbytes(rng.randint(1, 100)), b"\xff\xfe", b"\xef\xbb\xbf", b"\x00" * 64, b"[" * 100_000])
    files[name] = content[:at] + junk + content[at:]
    return name


def swap_files(rng: Random, files: Files) -> str:
    (one, content), (other, another) = _choose(rng, files), _choose(rng, files)
    files[one], files[other] = another, content
    return f"{one} and {other}"


def remove(rng: Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    del files[name]
    return name


def replace(rng: Random, files: Files) -> str:
    """Replaces a file by something that blocks, never ends, is outside the directory, or is not a file."""
    name = rng.choice(sorted(files))
    targets = ["/dev/zero", "/dev/null", "/proc/self/mem", "/nowhere", name, ".", "..", "../outside"]
    target = rng.choice([*targets, *(f"../outside/{other}" for other in files)])
    files[name] = rng.choice([Other("fifo"), Other("directory"), Other("link", target), Other("link", target)])
    return f"{name} {files[name]}"


def _change_token(rng: Random, text: str) -> str:
    """Replaces a value or a key, which may then occur twice; rarely deep in a vocabulary."""
    tokens = list(_TOKEN.finditer(text))
    chosen = rng.choice(tokens[: rng.choice([8, 40, 200, len(tokens)])])
    word, keys = chosen.group().rstrip(": "), [token for token in tokens[:200] if token["key"]]
    if chosen["key"]:
        new = rng.choice([rng.choice(keys).group(), '"":', '"x":', '"\\ud800":', '"__metadata__":', ""])
    elif word[0] in "-0123456789" and rng.random() < 0.4:
        number = float(word) if set(word) & set(".eE") else int(word)
        new = json.dumps(rng.choice([number - 1, number + 1, -number, number * 2, number * 1000, number / 2]))
    else:
        new = rng.choice(VALUES)
    return text[: chosen.start()] + new + text[chosen.end() :]


def change_json(rng: Random, files: Files) -> str:
    name, content = _choose(rng, files, ".json")
    files[name] = _change_token(rng, content.decode()).encode()
    return name


def change_header(rng: Random, files: Files) -> str:
    name, content = _choose(rng, files, ".safetensors")
    header, numbers = _header(content)
    files[name] = _with_header(_change_token(rng, header.decode()).encode(), numbers)
    return name


def lie_about_length(rng: Random, files: Files) -> str:
    name, content = _choose(rng, files, ".safetensors")
    real, size = struct.unpack("<Q", content[:8])[0], len(content)
    lie = rng.choice([0, 1, 2, real - 1, real + 1, real + 8, size - 8, size - 7, size, 2**24, 2**32, 2**63, 2**64 - 1])
    files[name] = struct.pack("<Q", lie) + content[8:]
    return f"{name} {lie}"


def change_layout(rng: Random, files: Files) -> str:
    """Makes overlaps, gaps, swapped shapes, other dtypes or other names; the header stays well-formed."""
    name, content = _choose(rng, files, ".safetensors")
    text, numbers = _header(content)
    header = json.loads(text)
    tensors = sorted(header.keys() - {"__metadata__"})
    one, other = rng.choice(tensors), rng.choice(tensors)
    entry, another = header[one], header[other]
    start, stop = entry["data_offsets"]
    match rng.randrange(7):
        case 0:
            entry["data_offsets"] = another["data_offsets"]
        case 1:
            entry["data_offsets"] = [start + rng.choice([-4, 4, 1]), stop + rng.choice([-4, 4, 0])]
        case 2:
            shapes = [entry["shape"][::-1], another["shape"], [math.prod(entry["shape"])], [2**31] * 3, [0], [1] * 9]
            entry["shape"] = rng.choice(shapes)
        case 3:
            entry["dtype"] = rng.choice(["F16", "BF16", "F64", "I64", "BOOL", "U8", "F8_E4M3", "C64", "F4", "f32"])
        case 4:
            header[one], header[other] = another, entry
        case 5:
            header[one] = list(entry.values())  # as a struct is written in formats without names
        case _:
            entry |= {"dtype": "F16", "shape": [*entry["shape"][:-1], 2 * entry["shape"][-1]]}
    files[name] = _with_header(json.dumps(header).encode(), numbers)
    return name


def spoil_numbers(rng: Random, files: Files) -> str:
    name, content = _choose(rng, files, ".safetensors")
    header, numbers = _header(content)
    at, number = 4 * rng.randrange(len(numbers) // 4), rng.choice([math.nan, math.inf, -math.inf, 3e38, 1e-45, 1e10])
    files[name] = _with_header(header, numbers[:at] + struct.pack("<f", number) + numbers[at + 4 :])
    return name


def spoil_tokenizer(rng: Random, files: Files) -> str:
    """Makes changes that random values would rarely hit: ids that demand memory, expressions that demand time."""
    name, content = _choose(rng, files, "tokenizer.json")
    raw = json.loads(content)
    big = rng.choice([320, 10**6, 10**9, 2**32 - 1, 2**32, -1])
    piece, regex = rng.choice(sorted(raw["model"]["vocab"])), rng.choice(EVIL_REGEX)
    added = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": rng.random() < 0.5}
    special = {"b": {"id": "b", "ids": [big], "tokens": ["b"]}}
    single = [{"SpecialToken": {"id": rng.choice("bc"), "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    unigram = {"type": "Unigram", "unk_id": big, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": True}
    word_piece = {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "?", "max_input_chars_per_word": 9}
    pad = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    cut_off = {"direction": "Right", "max_length": abs(big) % 3, "strategy": "LongestFirst", "stride": 9}
    split: dict[str, Any] = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    merges = rng.choice([[["a", "zz"]], ["a  b"], [[]], [["a"]], [["", ""]] * 50, ["x"] * 9])
    raw |= rng.choice(
        [
            {"model": {**raw["model"], "vocab": {**raw["model"]["vocab"], piece: big}}},
            {"model": {**raw["model"], "merges": merges}},
            {"model": rng.choice([unigram, word_piece, {"type": "Unigram", "unk_id": None, "vocab": []}])},
            {"added_tokens": [*raw["added_tokens"], {"id": big, "content": rng.choice(["", "<x>", piece]), **added}]},
            {"padding": {"strategy": {"Fixed": big}, **pad}},
            {"truncation": cut_off},
            {"pre_tokenizer": split},
            {"post_processor": {"type": "TemplateProcessing", "single": single, "special_tokens": special, "pair": []}},
        ]
    )
    files[name] = json.dumps(raw).encode()
    return name


def grow_text(rng: Random, files: Files) -> str:
    """Makes chains of steps that each lengthen a text, and post-processors that add many tokens."""
    name, content = _choose(rng, files, "tokenizer.json")
    raw, n_steps = json.loads(content), rng.choice([1, 2, 5, 20, 40, 2000])
    letter, ligature = rng.choice("ae \u0644"), rng.choice(["ee", "\ufdfa", "e" * 300, "\u00e9" * 20])
    replace = {"type": "Replace", "pattern": {"String": letter}, "content": ligature, "normalizers": []}
    steps: list[dict[str, Any]] = [replace, {"type": "NFKC"}, {"type": "ByteLevel"}, {"type": "Lowercase"}]
    bytewise = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": False, "use_regex": False}
    special = {"x": {"id": "x", "ids": [0] * n_steps, "tokens": ["x"] * n_steps}}
    pieces = [{"SpecialToken": {"id": "x", "type_id": 0}}] * rng.choice([1, 30, 2000])
    text = {"Sequence": {"id": "A", "type_id": 0}}
    template = {"type": "TemplateProcessing", "single": [*pieces, text], "pair": [text], "special_tokens": special}
    raw |= rng.choice(
        [
            {"normalizer": {"type": "Sequence", "normalizers": rng.choices(steps, k=2) * n_steps}},
            {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [bytewise] * n_steps}},
            {"post_processor": template},
            {"post_processor": {"type": "Sequence", "processors": [template] * rng.choice([1, 3, 60])}},
        ]
    )
    files[name] = json.dumps(raw).encode()
    return name


def spoil_index(rng: Random, files: Files) -> str:
    name = "model.safetensors.index.json"
    index, weight_map = files.get(name), {"model.norm.weight": "model.safetensors"}
    if isinstance(index, bytes):
        weight_map = json.loads(index)["weight_map"]
    tensor, shards = rng.choice(sorted(weight_map)), sorted(set(weight_map.values()))
    names = ["../a.safetensors", "/etc/passwd", "config.json", "sub/a.safetensors", "..", "", "\x00.safetensors", name]
    other = rng.choice([*names, *shards, "gone.safetensors"])
    missing = {key: shard for key, shard in weight_map.items() if key != tensor}
    changed = rng.choice([{**weight_map, tensor: other}, missing, {**weight_map, "surprise": shards[0]}, {}])
    files[name] = json.dumps({"metadata": {}, "weight_map": changed}).encode()
    return name


def bomb(rng: Random, files: Files) -> str:
    """Makes a few megabytes of JSON that take as much memory as possible."""
    name, _ = _choose(rng, files)
    text = rng.choice([b'{"a":[' + b"[]," * 2_500_000 + b"0]}", b'{"a":[' + b"{}," * 2_500_000 + b"0]}"])
    files[name] = _with_header(text, b"") if name.endswith(".safetensors") else text
    return name


_BYTES = [*[flip_bits] * 4, *[cut] * 4, *[insert] * 2, *[replace] * 3, remove]
_MUTATIONS: list[Callable[[Random, Files], str]] = [
    *_BYTES,
    *([change_json] * 12 + [change_header] * 5 + [change_layout] * 4 + [lie_about_length] * 2 + [swap_files] * 2),
    *([spoil_numbers] * 2 + [spoil_tokenizer] * 3 + [grow_text] * 3 + [spoil_index] * 2),
]


def mutate(rng: Random, files: Files) -> str:
    """Breaks `files` in one or two ways, and returns a description."""
    if rng.random() < 0.004:
        return f"bomb {bomb(rng, files)}"
    mutation = rng.choice(_MUTATIONS)
    mutations = f"{mutation.__name__} {mutation(rng, files)}"
    if rng.random() < 0.15:
        then = rng.choice(_BYTES)
        mutations += f"; {then.__name__} {then(rng, files)}"
    return mutations
