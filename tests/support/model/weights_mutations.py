"""Seeded ways to break a weights directory that is a dict of its files.

A file is bytes, or an Other: something that is no regular file of the directory.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any


@dataclass(frozen=True, slots=True)
class Other:
    """What replaces a file: fifo, directory, or a link to `target`."""

    kind: str
    target: str = ""


Files = dict[str, bytes | Other]


class Raw(str):
    """JSON text to be written as it is."""


class Object(list[list[Any]]):
    """A JSON object as [key, value] lists, so that a key can stand there twice."""


def parse(content: bytes) -> Any:
    """Objects become Object."""
    return json.loads(content, object_pairs_hook=lambda pairs: Object([key, value] for key, value in pairs))


def dump(node: Any) -> str:
    """The JSON text of what parse() returns and the mutations put in."""
    if isinstance(node, Raw):
        return str(node)
    if isinstance(node, Object):
        return "{" + ",".join(f"{json.dumps(key)}:{dump(value)}" for key, value in node) + "}"
    if isinstance(node, list):
        return "[" + ",".join(map(dump, node)) + "]"
    return json.dumps(node)


VALUES: list[Any] = [
    *(0, 1, -1, 2, 3, 7, 255, 65_536, 2**31 - 1, 2**31, 2**32, 10**9, 10**12, 2**53 + 1, 2**63, 10**40, -(10**12)),
    *(0.0, 0.5, -1.5, 1e-300, 1e300, 3.0, True, False, None, "", "x", "llama", "gpt2", "\ud800", "a\nb", "\x1b[2J"),
    *map(Raw, ("NaN", "Infinity", "-Infinity", "1e999", "-0.0", "[]", "{}", "[[]]", '{"a":{"b":[1]}}', "[1,2,3]")),
    *(Raw("9" * 5000), "x" * 10_000, Raw("[" * 40 + "]" * 40), Raw("[" * 900 + "]" * 900), Raw("[" * 100_000)),
    *map(Raw, ('{"a":' * 100_000, "nul", "'x'", "//", "0x10", "\x00", '"\\ud83d"', '"\\u0000"')),
]
EVIL_REGEX = ("(a+)+$", "(x?){9999}", "(?<n>a|b\\g<n>c)", "[", "(?i:\\p{L}+)*\\1", "(.*)*(.*)*(.*)*z", "", "\\G+")


def _bytes_file(rng: Random, files: Files, names: list[str] | None = None) -> str:
    return rng.choice(sorted(n for n, c in files.items() if isinstance(c, bytes) and c and n in (names or files)))


def _content(files: Files, name: str) -> bytes:
    content = files[name]
    assert isinstance(content, bytes)
    return content


def flip_bits(rng: Random, files: Files) -> str:
    name = _bytes_file(rng, files)
    content = bytearray(_content(files, name))
    # Half of them hit the beginning, where a header stands.
    reach = min(len(content), 600) if rng.random() < 0.5 else len(content)
    for _ in range(rng.randint(1, 8)):
        content[rng.randrange(reach)] ^= 1 << rng.randrange(8)
    files[name] = bytes(content)
    return name


def truncate(rng: Random, files: Files) -> str:
    name = _bytes_file(rng, files)
    content = _content(files, name)
    files[name] = content[: rng.choice([0, 1, 7, 8, 9, len(content) - 1, rng.randrange(len(content))])]
    return name


def insert(rng: Random, files: Files) -> str:
    name = _bytes_file(rng, files)
    content = _content(files, name)
    at = rng.choice([0, 8, len(content), rng.randrange(len(content))])
    junk = rng.choice([rng.randbytes(rng.randint(1, 100)), b"\xff\xfe", b"\xef\xbb\xbf", b"\x00" * 64, b"[" * 100_000])
    files[name] = content[:at] + junk + content[at:]
    return name


def cut_out(rng: Random, files: Files) -> str:
    name = _bytes_file(rng, files)
    content = _content(files, name)
    at = rng.randrange(len(content))
    files[name] = content[:at] + content[at + rng.randint(1, 200) :]
    return name


def swap_files(rng: Random, files: Files) -> str:
    one, other = _bytes_file(rng, files), _bytes_file(rng, files)
    files[one], files[other] = files[other], files[one]
    return f"{one} and {other}"


def remove(rng: Random, files: Files) -> str:
    name = rng.choice(sorted(files))
    del files[name]
    return name


def replace(rng: Random, files: Files) -> str:
    """By things that block, never end, lie outside, or are no files at all."""
    name = rng.choice(sorted(files))
    targets = ["/dev/zero", "/dev/null", "/proc/self/mem", "/nowhere", name, ".", "..", "../outside"]
    target = rng.choice([*targets, *(f"../outside/{other}" for other in files)])
    files[name] = rng.choice([Other("fifo"), Other("directory"), Other("link", target), Other("link", target)])
    return f"{name} {files[name]}"


def _nodes(tree: Any) -> list[tuple[list[Any], int]]:
    """Every (container, index) of a tree; more of them near the root than deep in a vocabulary."""
    found, todo = [], [tree]
    while todo:
        node = todo.pop()
        for index, value in enumerate(node[:40]):
            container, at = (value, 1) if isinstance(node, Object) else (node, index)
            found.append((container, at))
            if isinstance(container[at], list):
                todo.append(container[at])
    return found


def change_value(rng: Random, _files: Files, tree: Any) -> Any:
    if nodes := _nodes(tree):
        container, at = rng.choice(nodes)
        old = container[at]
        near = [old - 1, old + 1, -old, old * 2, old * 1000, old / 2] if type(old) in (int, float) else VALUES
        container[at] = rng.choice(near if rng.random() < 0.4 else VALUES)
    return tree


def change_key(rng: Random, _files: Files, tree: Any) -> Any:
    objects = [tree, *(container[at] for container, at in _nodes(tree))]
    chosen = rng.choice([node for node in objects if isinstance(node, Object) and node] or [Object([["a", 1]])])
    pair = rng.choice(chosen)
    match rng.randrange(4):
        case 0:
            chosen.remove(pair)
        case 1:
            chosen.append([pair[0], rng.choice([pair[1], *VALUES])])
        case 2:
            pair[0] = rng.choice(["", "x", "\ud800", "__metadata__", "a\nb", "x" * 1000, rng.choice(chosen)[0]])
        case _:
            other = rng.choice(chosen)
            pair[1], other[1] = other[1], pair[1]
    return tree


def _json(change: Callable[[Random, Files, Any], Any]) -> Callable[[Random, Files], str]:
    def mutate(rng: Random, files: Files) -> str:
        name = _bytes_file(rng, files, [n for n in files if n.endswith(".json")])
        files[name] = dump(change(rng, files, parse(_content(files, name)))).encode()
        return f"{name} {change.__name__}"

    return mutate


def _header(change: Callable[[Random, Files, Any], Any]) -> Callable[[Random, Files], str]:
    def mutate(rng: Random, files: Files) -> str:
        name = _bytes_file(rng, files, [n for n in files if n.endswith(".safetensors")])
        content = _content(files, name)
        end = 8 + struct.unpack("<Q", content[:8])[0]
        header = dump(change(rng, files, parse(content[8:end]))).encode()
        files[name] = struct.pack("<Q", len(header)) + header + content[end:]
        return f"{name} {change.__name__}"

    return mutate


def lie_about_length(rng: Random, files: Files) -> str:
    name = _bytes_file(rng, files, [n for n in files if n.endswith(".safetensors")])
    content = _content(files, name)
    real = struct.unpack("<Q", content[:8])[0]
    size = len(content)
    lie = rng.choice([0, 1, 2, real - 1, real + 1, real + 8, size - 8, size - 7, size, 2**24, 2**32, 2**63, 2**64 - 1])
    files[name] = struct.pack("<Q", lie) + content[8:]
    return f"{name} {lie}"


def change_layout(rng: Random, _files: Files, tree: Any) -> Any:
    """Overlaps, gaps, swapped shapes, other dtypes, other names: all of it well-formed."""
    tensors = [pair for pair in tree if pair[0] != "__metadata__"]
    one, other = rng.choice(tensors), rng.choice(tensors)
    fields = {key: pair for pair in one[1] for key in [pair[0]]}
    others = {key: pair for pair in other[1] for key in [pair[0]]}
    start, stop = fields["data_offsets"][1]
    match rng.randrange(8):
        case 0:
            fields["data_offsets"][1] = others["data_offsets"][1]
        case 1:
            fields["data_offsets"][1] = [start + rng.choice([-4, 4, 1]), stop + rng.choice([-4, 4, 0])]
        case 2:
            fields["shape"][1] = rng.choice([fields["shape"][1][::-1], others["shape"][1], [2**31] * 3, [0], [1] * 9])
        case 3:
            fields["shape"][1] = [math.prod(fields["shape"][1])]
        case 4:
            fields["dtype"][1] = rng.choice(["F16", "BF16", "F64", "I64", "BOOL", "U8", "F8_E4M3", "C64", "F4", "f32"])
        case 5:
            one[0], other[0] = other[0], one[0]
        case 6:
            one[0] = other[0]
        case _:
            fields["dtype"][1] = "F16"
            fields["shape"][1] = [*fields["shape"][1][:-1], 2 * fields["shape"][1][-1]]
    return tree


def spoil_numbers(rng: Random, files: Files) -> str:
    name = _bytes_file(rng, files, [n for n in files if n.endswith(".safetensors")])
    content = bytearray(_content(files, name))
    end = 8 + struct.unpack("<Q", content[:8])[0]
    at = end + 4 * rng.randrange((len(content) - end) // 4)
    content[at : at + 4] = struct.pack("<f", rng.choice([math.nan, math.inf, -math.inf, 3e38, 1e-45, 1e10]))
    files[name] = bytes(content)
    return name


def spoil_tokenizer(rng: Random, files: Files) -> str:
    """What a random value would seldom hit: ids that ask for memory, expressions that ask for time."""
    raw = json.loads(_content(files, "tokenizer.json"))
    big = rng.choice([320, 10**6, 10**9, 2**32 - 1, 2**32, -1])
    piece = rng.choice(sorted(raw["model"]["vocab"]))
    fixed = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}
    added = {"single_word": False, "lstrip": False, "rstrip": True, "normalized": False, "special": rng.random() < 0.5}
    template = {"special_tokens": {"b": {"id": "b", "ids": [big], "tokens": ["b"]}}, "pair": []}
    single = [{"SpecialToken": {"id": rng.choice("bc"), "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    match rng.randrange(8):
        case 0:
            raw["model"]["vocab"][piece] = big
        case 1:
            raw["added_tokens"].append({"id": big, "content": rng.choice(["", "a", "<x>", piece]), **added})
        case 2:
            raw["padding"] = {"strategy": {"Fixed": big}, **fixed}
        case 3:
            raw["truncation"] = {
                "direction": "Right",
                "max_length": abs(big) % 3,
                "strategy": "LongestFirst",
                "stride": 9,
            }
        case 4:
            raw["pre_tokenizer"] = {
                "type": "Split",
                "pattern": {"Regex": rng.choice(EVIL_REGEX)},
                "behavior": "Isolated",
                "invert": False,
            }
        case 5:
            raw["model"]["merges"] = rng.choice([[["a", "zz"]], ["a  b"], [[]], [["a"]], [["", ""]] * 50, ["x"] * 9])
        case 6:
            raw["post_processor"] = {"type": "TemplateProcessing", "single": single, **template}
        case _:
            raw["model"] = rng.choice(
                [
                    {"type": "Unigram", "unk_id": big, "vocab": [["a", -1.0], ["b", -2.0]], "byte_fallback": True},
                    {"type": "Unigram", "unk_id": None, "vocab": []},
                    {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "?"},
                    {"type": "WordPiece", "vocab": {"a": 0}, "unk_token": "?", "max_input_chars_per_word": 9},
                ]
            )
    files["tokenizer.json"] = json.dumps(raw).encode()
    return "tokenizer.json"


def spoil_index(rng: Random, files: Files) -> str:
    name = "model.safetensors.index.json"
    weight_map = {"model.norm.weight": "model.safetensors"}
    if isinstance(files.get(name), bytes):
        weight_map = json.loads(_content(files, name))["weight_map"]
    tensor, shards = rng.choice(sorted(weight_map)), sorted(set(weight_map.values()))
    names = ["../a.safetensors", "/etc/passwd", "config.json", "sub/a.safetensors", "..", "", "\x00.safetensors", name]
    match rng.randrange(4):
        case 0:
            weight_map[tensor] = rng.choice([*names, *shards, "gone.safetensors"])
        case 1:
            del weight_map[tensor]
        case 2:
            weight_map["surprise"] = rng.choice(shards)
        case _:
            weight_map = rng.choice([{}, dict.fromkeys(weight_map, shards[0])])
    files[name] = json.dumps({"metadata": {}, "weight_map": weight_map}).encode()
    return name


def bomb(rng: Random, files: Files) -> str:
    """As much memory as a few megabytes of JSON can take."""
    name = _bytes_file(rng, files)
    text = rng.choice([b'{"a":[' + b"[]," * 2_500_000 + b"0]}", b'{"a":[' + b"{}," * 2_500_000 + b"0]}"])
    if name.endswith(".safetensors"):
        text = struct.pack("<Q", len(text)) + text
    files[name] = text
    return name


_OFTEN = [_json(change_value)] * 8 + [_header(change_value)] * 3 + [_header(change_layout)] * 4 + [replace] * 3
_MUTATIONS: list[Callable[[Random, Files], str]] = [
    *_OFTEN,
    *([_json(change_key)] * 4 + [_header(change_key)] * 2 + [lie_about_length] * 2 + [flip_bits] * 4 + [truncate] * 2),
    *([insert] * 2 + [cut_out] * 2 + [swap_files] * 2 + [remove, spoil_numbers, spoil_numbers]),
    *([spoil_tokenizer] * 3 + [spoil_index] * 2),
]


def mutate(rng: Random, files: Files) -> str:
    """Breaks `files` in one or two ways and says how."""
    if rng.random() < 0.004:
        return f"bomb {bomb(rng, files)}"
    first, then = rng.choice(_MUTATIONS), rng.choice(_MUTATIONS)
    mutations = f"{first.__name__} {first(rng, files)}"
    if rng.random() < 0.15 and then in (flip_bits, truncate, insert, cut_out, replace, remove):
        mutations += f"; {then.__name__} {then(rng, files)}"
    return mutations
