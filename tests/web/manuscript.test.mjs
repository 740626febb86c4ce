// manuscript.js: model text stays marked whatever the user types around it.

import assert from "node:assert/strict";
import test from "node:test";

import { difference, Manuscript } from "../../app/web/text/manuscript.js";

const TOKEN = { id: 1, text: " x", bytes: [32, 120], logprob: -1, top: [] };
const marked = (manuscript) => manuscript.written.map(([start, end]) => manuscript.text.slice(start, end));

function written(...texts) {
  const manuscript = new Manuscript({ text: "I" });
  for (const text of texts) manuscript.append(text, [TOKEN]);
  return manuscript;
}

test("consecutive tokens form one range", () => {
  const manuscript = written(" am", " here");
  assert.equal(manuscript.text, "I am here");
  assert.deepEqual(manuscript.units.map(({ start, end }) => [start, end]), [[1, 4], [4, 9]]);
  assert.deepEqual(marked(manuscript), [" am here"]);
});

test("line ends become LF, also when split between two tokens", () => {
  const manuscript = written("a\r", "", "\nb\r\nc\r", "d");
  assert.equal(manuscript.text, "Ia\nb\nc\nd");
  assert.deepEqual(manuscript.units.map(({ start, end }) => manuscript.text.slice(start, end)), ["a\n", "", "b\nc\n", "d"]);
});

test("text typed inside generated text is the user's, and drops the token details after it", () => {
  const manuscript = written(" am", " not", " here");
  manuscript.rewrite("I am no longer here");
  assert.deepEqual(marked(manuscript), [" am no", " here"]);
  const [first, ...others] = manuscript.units;
  assert.deepEqual(first.tokens, [TOKEN]);
  assert.ok(others.every(({ tokens }) => tokens === null));
});

test("typing after, before and over generated text", () => {
  const after = written(" am");
  after.rewrite("I am!");
  assert.deepEqual(marked(after), [" am"]);
  assert.deepEqual(after.units[0].tokens, [TOKEN], "tokens before the edit keep their details");
  const before = written(" am");
  before.rewrite("So I am");
  assert.deepEqual(marked(before), [" am"]);
  assert.equal(before.units[0].tokens, null, "the tokens were sampled after another text");
  const over = written(" am");
  over.rewrite("");
  assert.deepEqual(over.written, []);
});

test("a cut keeps the text before it", () => {
  const manuscript = written(" am", " here");
  manuscript.cut(6);
  assert.equal(manuscript.text, "I am h");
  assert.deepEqual(marked(manuscript), [" am h"]);
});

test("a state does not change with its manuscript", () => {
  const manuscript = written(" am");
  const { state } = manuscript;
  manuscript.append(" here");
  manuscript.rewrite("");
  assert.equal(state.text, "I am");
  assert.deepEqual(new Manuscript(state).written, [[1, 4]]);
});

test("after random edits the text is right, and units are in order and exclude typed text", () => {
  let seed = 7;
  const random = (n) => (seed = (seed * 1103515245 + 12345) % 2 ** 31) % n;
  for (let round = 0; round < 300; round++) {
    const manuscript = written("abc".repeat(random(4)), "xyz", "\n", "abab");
    for (let edit = 0; edit < 5; edit++) {
      const { text } = manuscript;
      const start = random(text.length + 1);
      const after = text.slice(0, start) + "UV".repeat(random(3)) + text.slice(start + random(4));
      manuscript.rewrite(after);
      assert.equal(manuscript.text, after);
      let end = 0;
      for (const unit of manuscript.units) {
        assert.ok(unit.start >= end && unit.end <= after.length);
        end = unit.end;
      }
      assert.ok(marked(manuscript).every((piece) => !/[UV]/.test(piece)));
    }
  }
});

test("the difference of two texts is one range", () => {
  assert.deepEqual(difference("aaa", "aaaa"), { start: 3, removed: 0, added: 1 });
  assert.deepEqual(difference("abcd", "axd"), { start: 1, removed: 2, added: 1 });
  assert.deepEqual(difference("same", "same"), { start: 4, removed: 0, added: 0 });
});

test("inserted text is the model's, and later tokens move along without their details", () => {
  const tokens = [{ id: 1 }];
  const draft = new Manuscript({ text: "One two three", units: [{ start: 3, end: 7, tokens }, { start: 7, end: 13, tokens }] });
  draft.open(3, 9);
  assert.equal(draft.text, "Onehree");
  const unit = draft.append(" and\r\n", tokens);
  assert.deepEqual([unit.start, unit.end], [3, 8]);
  draft.append(" x", tokens);
  assert.equal(draft.text, "One and\n xhree");
  assert.deepEqual(draft.written, [[3, 14]]);
  assert.deepEqual(draft.state.units.map(({ start, end, tokens }) => [start, end, Boolean(tokens)]), [[3, 8, true], [8, 10, true], [10, 14, false]]);
  assert.equal(draft.close(7, " "), 8);
  assert.equal(draft.text, "One and hree");
  assert.deepEqual(draft.written, [[3, 7], [8, 12]], "the blank belongs to neither author");
  draft.append("!");
  assert.equal(draft.text, "One and hree!", "appends at the end again");
});
