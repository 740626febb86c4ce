// Where a sentence ends, however the text is cut into tokens.
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

test("a sentence is given out as soon as the next one begins, not later", () => {
  const sentences = new Sentences();
  const given = ["It rained", ".", " ", "T", "hen"].map((piece) => sentences.feed(piece).length);
  assert.deepEqual(given, [0, 0, 0, 1, 0]);
});

test("text without sentences comes in pieces, and nothing is lost", () => {
  const text = "word ".repeat(500);
  const pieces = read(text);
  assert.ok(pieces.length > 4 && pieces.every((piece) => piece.length <= 400));
  assert.equal(pieces.join(" "), text.trim());
  assert.equal(read("w".repeat(1000)).join(""), "w".repeat(1000));
});

test("the last sentence is the one that goes on", () => {
  assert.equal(lastSentence("It rained. Mr. Darcy went to the"), "Mr. Darcy went to the");
  assert.equal(lastSentence("It rained. It stopped. "), "It stopped.");
  assert.equal(lastSentence(""), "");
  assert.equal(lastSentence(`${"far ".repeat(100)}away`, 20), "\u2026 far far far away");
});

test("where sentences are replaced, only whole ones come in their place; other text comes as it was written", () => {
  const fitted = (written, replaced, behind = "") => {
    const { length, blank } = fit(written, replaced, behind);
    return written.slice(0, length) + blank;
  };
  assert.equal(fitted(" It was cold. Mr. Gray left. She", " It rained."), " It was cold. Mr. Gray left.");
  assert.equal(fitted(" It was cold.\n", " It rained."), " It was cold.");
  assert.equal(fitted(" It was so cold that", " It rained."), " It was so cold that", "no sentence has ended");
  assert.equal(fitted(" red. And", " blue"), " red. And");
  assert.equal(fitted(" red", "", "house"), " red ", "two words stay two");
  assert.equal(fitted(" red", "", ", old"), " red");
  assert.equal(fitted(" red\n", "", "house"), " red\n");
});

test("what is rewritten begins with the blank before it, and ends before the one behind it", () => {
  const text = "One two  three.";
  const span = (start, end) => text.slice(...Object.values(rewritten(text, { start, end })));
  assert.equal(span(4, 7), " two");
  assert.equal(span(3, 9), " two");
  assert.equal(span(0, 4), "One");
});
