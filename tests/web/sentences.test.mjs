// Sentences end at the same places however the text is split into tokens.
import assert from "node:assert/strict";
import test from "node:test";
import { fit, lastSentence, rewritten, Sentences } from "../../app/web/text/sentences.js";

function read(...pieces) {
  const sentences = new Sentences();
  return [...pieces.flatMap((piece) => sentences.feed(piece)), ...sentences.flush()];
}

const TEXTS = {
  "two plain ones": ["The rain stopped. We listened.", ["The rain stopped.", "We listened."]],
  "titles": ["Mr. Darcy bowed. Mrs. Bennet did not.", ["Mr. Darcy bowed.", "Mrs. Bennet did not."]],
  "abbreviations": ["Bring fruit, e.g. Pears, i.e. Those. Go!", ["Bring fruit, e.g. Pears, i.e. Those.", "Go!"]],
  "numbers": ["It costs 3.5 pounds. No. 7 is better.", ["It costs 3.5 pounds.", "No. 7 is better."]],
  "short answers": ["No. So did I. Then we left.", ["No.", "So did I.", "Then we left."]],
  "initials": ["J. R. R. Tolkien went to the U.S. Navy. So?", ["J. R. R. Tolkien went to the U.S. Navy.", "So?"]],
  "closing quotes": ['"Come in." She came. (He left.) Then', ['"Come in."', "She came.", "(He left.)", "Then"]],
  "curly quotes": ["\u201cNo!\u201d \u201cYes.\u201d Well.", ["\u201cNo!\u201d", "\u201cYes.\u201d", "Well."]],
  "speech that goes on": ['"Stop!" he said. "Why?" asked Ann.', ['"Stop!" he said.', '"Why?" asked Ann.']],
  "an ellipsis within": ["He waited... and slept. So... He woke.", ["He waited... and slept.", "So...", "He woke."]],
  "lines that wrap": ["The sea was\ncalm. It\nwas late.", ["The sea was calm.", "It was late."]],
  "a heading": ["Chapter 1\n\nIt was late", ["Chapter 1", "It was late"]],
  "marks without a space": ["\u597d\u3002\u597d\u5417\uff1f\u597d", ["\u597d\u3002", "\u597d\u5417\uff1f", "\u597d"]],
  "nothing": [" \n\n \n", []],
};

for (const [name, [text, sentences]] of Object.entries(TEXTS)) {
  test(`${name}, at once and letter by letter`, () => {
    assert.deepEqual(read(text), sentences);
    assert.deepEqual(read(...text), sentences);
  });
}

test("a sentence is returned as soon as the next one begins", () => {
  const sentences = new Sentences();
  const given = ["It rained", ".", " ", "T", "hen"].map((piece) => sentences.feed(piece).length);
  assert.deepEqual(given, [0, 0, 0, 1, 0]);
});

test("text without sentences is returned in pieces without loss", () => {
  const text = "word ".repeat(500);
  const pieces = read(text);
  assert.ok(pieces.length > 4 && pieces.every((piece) => piece.length <= 400));
  assert.equal(pieces.join(" "), text.trim());
  assert.equal(read("w".repeat(1000)).join(""), "w".repeat(1000));
});

test("the last sentence is the one being written", () => {
  assert.equal(lastSentence("It rained. Mr. Darcy went to the"), "Mr. Darcy went to the");
  assert.equal(lastSentence("It rained. It stopped. "), "It stopped.");
  assert.equal(lastSentence(""), "");
  assert.equal(lastSentence(`${"far ".repeat(100)}away`, 20), "\u2026 far far far away");
});

test("sentences are replaced by whole sentences only, and other text by any text", () => {
  const fitted = (written, replaced, behind = "") => {
    const { length, blank } = fit(written, replaced, behind);
    return written.slice(0, length) + blank;
  };
  assert.equal(fitted(" It was cold. Mr. Gray left. She", " It rained."), " It was cold. Mr. Gray left.");
  assert.equal(fitted(" It was cold.\n", " It rained."), " It was cold.");
  assert.equal(fitted(" It was so cold that", " It rained."), " It was so cold that", "no complete sentence");
  assert.equal(fitted(" red. And", " blue"), " red. And");
  assert.equal(fitted(" red", "", "house"), " red ", "words stay separate");
  assert.equal(fitted(" red", "", ", old"), " red");
  assert.equal(fitted(" red\n", "", "house"), " red\n");
});

const rewrittenIn = (text) => (start, end) => text.slice(...Object.values(rewritten(text, { start, end })));

test("a rewritten range includes the blank before it but not the one after it", () => {
  const span = rewrittenIn("One two  three.");
  assert.equal(span(4, 7), " two");
  assert.equal(span(3, 9), " two");
  assert.equal(span(0, 4), "One");
});

test("a selection that starts or ends inside a word is extended to whole words", () => {
  const span = rewrittenIn("She didn't wait,\nand left 3.14 euros.");
  assert.equal(span(1, 2), "She");
  assert.equal(span(6, 13), " didn't wait");
  assert.equal(span(4, 10), " didn't", "whole words are not extended");
  assert.equal(span(11, 16), " wait,", "selected punctuation");
  assert.equal(span(14, 22), " wait,\nand left", "across a line end");
  assert.equal(span(18, 19), "and", "the first word of a line");
  assert.equal(span(28, 29), " 3.14");
  assert.equal(span(36, 37), ".");
});

test("word boundaries in scripts without blanks or from right to left come from Intl.Segmenter", () => {
  assert.equal(rewrittenIn("\u6211\u559c\u6b22\u5317\u4eac\u3002")(4, 5), "\u5317\u4eac", "Beijing, with its second half selected");
  assert.equal(rewrittenIn("\u79c1\u306f\u6771\u4eac\u306b\u884c\u304d\u307e\u3057\u305f\u3002")(2, 3), "\u6771\u4eac", "Tokyo");
  assert.equal(rewrittenIn("\u0e09\u0e31\u0e19\u0e23\u0e31\u0e01\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e")(7, 9), "\u0e01\u0e23\u0e38\u0e07\u0e40\u0e17\u0e1e", "Bangkok");
  assert.equal(rewrittenIn("\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd")(6, 7), " \u05e2\u05d5\u05dc\u05dd");
  assert.equal(rewrittenIn("\u0645\u0631\u062d\u0628\u0627 \u0628\u0643\u0645")(1, 8), "\u0645\u0631\u062d\u0628\u0627 \u0628\u0643\u0645");
});

test("no character is split, and a line as long as a book takes no more work than a short one", () => {
  const family = "\u{1f468}\u200d\u{1f469}\u200d\u{1f467}";
  assert.equal(rewrittenIn(`So ${family} left`)(5, 8), ` ${family}`);
  const text = `${"word ".repeat(200_000)}last`;
  assert.equal(rewrittenIn(text)(500_001, 500_007), " word word");
  assert.equal(rewrittenIn(text)(text.length - 2, text.length), " last");
  assert.equal(rewrittenIn("w".repeat(1000))(500, 501).length, 401, "only the nearby part of an endless word");
});
