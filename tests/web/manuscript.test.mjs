// manuscript.js: what the model wrote stays marked whatever the user's hand does around it.

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

test("tokens that came stand in one stretch", () => {
  const manuscript = written(" am", " here");
  assert.equal(manuscript.text, "I am here");
  assert.deepEqual(manuscript.units.map(({ start, end }) => [start, end]), [[1, 4], [4, 9]]);
  assert.deepEqual(marked(manuscript), [" am here"]);
});

test("a line end is LF, also where it was cut between two tokens", () => {
  const manuscript = written("a\r", "", "\nb\r\nc\r", "d");
  assert.equal(manuscript.text, "Ia\nb\nc\nd");
  assert.deepEqual(manuscript.units.map(({ start, end }) => manuscript.text.slice(start, end)), ["a\n", "", "b\nc\n", "d"]);
});

test("what is typed inside generated text is the user's; details behind it are dropped, those before it stay", () => {
  const manuscript = written(" am", " not", " here");
  manuscript.rewrite("I am no longer here");
  assert.deepEqual(marked(manuscript), [" am no", " here"]);
  const [first, ...others] = manuscript.units;
  assert.deepEqual(first.tokens, [TOKEN]);
  assert.ok(others.every(({ tokens }) => tokens === null));
});

test("typing behind, before and over generated text", () => {
  const behind = written(" am");
  behind.rewrite("I am!");
  assert.deepEqual(marked(behind), [" am"]);
  assert.deepEqual(behind.units[0].tokens, [TOKEN], "what stands before the hand keeps its details");
  const before = written(" am");
  before.rewrite("So I am");
  assert.deepEqual(marked(before), [" am"]);
  assert.equal(before.units[0].tokens, null, "they were drawn after another text");
  const over = written(" am");
  over.rewrite("");
  assert.deepEqual(over.written, []);
});

test("a cut keeps what is before it", () => {
  const manuscript = written(" am", " here");
  manuscript.cut(6);
  assert.equal(manuscript.text, "I am h");
  assert.deepEqual(marked(manuscript), [" am h"]);
});

test("a state does not change with the manuscript that it was taken of", () => {
  const manuscript = written(" am");
  const { state } = manuscript;
  manuscript.append(" here");
  manuscript.rewrite("");
  assert.equal(state.text, "I am");
  assert.deepEqual(new Manuscript(state).written, [[1, 4]]);
});

test("random edits: text is the last one, units are in order and never show what the user typed", () => {
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

test("the difference of two texts is one stretch", () => {
  assert.deepEqual(difference("aaa", "aaaa"), { start: 3, removed: 0, added: 1 });
  assert.deepEqual(difference("abcd", "axd"), { start: 1, removed: 2, added: 1 });
  assert.deepEqual(difference("same", "same"), { start: 4, removed: 0, added: 0 });
});

test("what is written in the middle is the model's, and what stands behind it moves along without its details", () => {
  const told = [{ id: 1 }];
  const draft = new Manuscript({ text: "One two three", units: [{ start: 3, end: 7, tokens: told }, { start: 7, end: 13, tokens: told }] });
  draft.open(3, 9);
  assert.equal(draft.text, "Onehree");
  const unit = draft.append(" and\r\n", told);
  assert.deepEqual([unit.start, unit.end], [3, 8]);
  draft.append(" x", told);
  assert.equal(draft.text, "One and\n xhree");
  assert.deepEqual(draft.written, [[3, 14]]);
  assert.deepEqual(draft.state.units.map(({ start, end, tokens }) => [start, end, Boolean(tokens)]), [[3, 8, true], [8, 10, true], [10, 14, false]]);
  assert.equal(draft.close(7, " "), 8);
  assert.equal(draft.text, "One and hree");
  assert.deepEqual(draft.written, [[3, 7], [8, 12]], "the blank is nobody's");
  draft.append("!");
  assert.equal(draft.text, "One and hree!", "again at the end");
});
