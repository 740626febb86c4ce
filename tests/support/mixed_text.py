"""Mixed text for tokenizers and detokenizers: prose and code of this repository, other scripts, marks, odd spaces."""

from __future__ import annotations

import random
from functools import cache

from tests.support import ROOT

_SCRIPTS = (
    "狐狸在月光下唱歌,月亮回答了它。今天是2026年11月29日,气温12.5度。",
    "狐は月に歌を歌い、月は静かに答えた。ﾊﾝｶｸもカタカナも、「かぎ括弧」もある。",
    "여우가 달에게 노래를 불렀다. 밤은 길고 조용했다!",
    "Лиса пела луне, и луна ответила ей: «Кто ты?» — Ещё раз, №5.",
    "Η αλεπού τραγούδησε στο φεγγάρι· «ποια είσαι;»",
    "लोमड़ी ने चाँद के लिए गाया, और रात लंबी थी। १२३४",
    "สุนัขจิ้งจอกร้องเพลงให้ดวงจันทร์ฟัง",
    "Cáo hát cho mặt trăng nghe; đêm thật dài và yên tĩnh.",
    "Der Fuchs größtenteils über Ärger: „naïve façade“ – Ǆ ǅ ﬁ ﬃ ß ſ İı",
    # Arabic with a Latin word and digits, Hebrew with points, and direction marks
    "\u063a\u0646\u0649 \u0627\u0644\u062b\u0639\u0644\u0628 \u0644\u0644\u0642\u0645\u0631 fox "
    "\u0661\u0662\u0663\u060c \u0648\u0643\u0627\u0646 \u0627\u0644\u0644\u064a\u0644\u064f "
    "\u0637\u0648\u064a\u0644\u064b\u0627\u061f",
    "\u05d4\u05e9\u05bc\u05c1\u05d5\u05bc\u05e2\u05b8\u05dc \u05e9\u05c1\u05b8\u05e8 "
    "\u05dc\u05b7\u05d9\u05b8\u05bc\u05e8\u05b5\u05d7\u05b7 \u200f(12)\u200e \u202babc\u202c "
    "\u2067x\u2069",
)
_EMOJI = (
    "\U0001f98a\U0001f989\U0001f319",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466",  # a family, joined
    "\U0001f469\U0001f3fd\u200d\U0001f680 \U0001f44d\U0001f3ff",  # skin tones
    "\U0001f3f3\ufe0f\u200d\U0001f308 \U0001f1ea\U0001f1fa\U0001f1ef\U0001f1f5 1\ufe0f\u20e3 "
    "\u2764\ufe0f\u200d\U0001f525",
    "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e0063\U000e0074\U000e007f",  # a flag of tags
)
_MARKS = (
    "e\u0301 a\u0308o\u0302\u0323 n\u0303 \u0344 \u212b \u1e9b\u0323",  # NFD, and what NFC composes or replaces
    "Z\u0351\u0343\u0313a\u0334\u0315\u031bl\u0335\u0321g\u0338\u0361o\u0337",
    "\u1100\u1161\u11a8\u1112\u1175\u11ab \u0958 \u0b5c \u2adc",  # jamo; letters that NFC takes apart
)
_SPACES = (" ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u2003", "\u2028", "\u0085", "\x0b", "\x0c")
_ODD = (
    "\ufffd\ufffd \ufffe\uffff \ue000\U000f0000 \U0010ffff",
    "\x00\x01\x1b[31m\x7f\x80\x9f",
    "\ufeff\u200b\u200c\u2060\u00ad\u034f\u180e",
    "Ã©tÃ© â€™ ï¿½ Ðº",  # UTF-8 that was read as Latin-1
    "don't DON'T it's we'll They'RE I'm 'tis 'Twas l'été",
    "3.14159 1,234,567.89 0x1F 1e-9 12345678901234567890 v1.2.3-rc4 ²³ Ⅷ ½ ٣٤",
    "https://example.org/a?b=c&d=%20#e user@example.org C:\\dir\\file.txt /usr/bin/env",
    "snake_case camelCase HTTPServer2Go __init__ a+=b--; !!?? ...--- ***___ =======",
    '{"a": [1, 2.5, null, true], "b": {"\\u00e9": "x\\n"}}',
)


@cache
def _prose() -> tuple[str, ...]:
    """Paragraphs of the documentation."""
    text = (ROOT / "README.md").read_text(encoding="utf-8") + (ROOT / "docs/sampling.md").read_text(encoding="utf-8")
    return tuple(part for part in text.split("\n\n") if part.strip())


@cache
def _code() -> tuple[str, ...]:
    """Functions of this package, with their indentation."""
    text = (ROOT / "model/config.py").read_text(encoding="utf-8")
    return tuple(part for part in text.split("\n\n") if part.strip())


def _spaces(draw: random.Random) -> str:
    run = draw.choice(_SPACES) * draw.choice((1, 2, 3, 7, 31, 200))
    return run + "".join(draw.choices(_SPACES, k=draw.randint(0, 4)))


def mixed_text(size: int, seed: int) -> str:
    """At least `size` bytes of UTF-8, in snippets that are cut at random characters; deterministic."""
    draw, parts, length = random.Random(seed), list[str](), 0
    kinds = (_prose(), _code(), _SCRIPTS, _EMOJI, _MARKS, _ODD)
    while length < size:
        snippet = draw.choice(draw.choice(kinds))
        if draw.random() < 0.3:
            first = draw.randrange(len(snippet))
            snippet = snippet[first : first + draw.randint(1, 80)]
        parts.append(snippet + draw.choice(("", " ", "\n", "\n\n", _spaces(draw))))
        length += len(parts[-1].encode())
    return "".join(parts)


def mixed_texts(size: int, seed: int, *, longest: int = 16_000) -> list[str]:
    """mixed_text() cut at random into texts of up to `longest` characters."""
    text, draw, texts, start = mixed_text(size, seed), random.Random(seed), list[str](), 0
    while start < len(text):
        end = start + draw.choice((1, 2, 10, 100, 1000, longest))
        texts.append(text[start:end])
        start = end
    return texts
