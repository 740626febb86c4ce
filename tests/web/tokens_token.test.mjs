// The description of one token.

import assert from "node:assert/strict";
import { test } from "node:test";
import * as token from "../../app/web/tokens/token.js";

test("probability, surprise and rank belong to the chosen token", () => {
  const top = [{ id: 7, logprob: Math.log(0.5) }, { id: 3, logprob: Math.log(0.25) }];
  const taken = { id: 3, logprob: Math.log(0.25), top };
  near(token.probability(taken), 0.25);
  near(token.surprise(taken), 2);
  assert.equal(token.rank(taken), 2);
  assert.equal(token.rank({ id: 4, logprob: -9, top }), null, "not among the reported tokens");
  assert.deepEqual([token.probability({ logprob: null }), token.surprise({ logprob: null })], [null, null]);
  assert.ok(Object.is(token.surprise({ logprob: 0 }), 0));
});

test("entropy counts all unreported tokens as one", () => {
  near(token.entropy([0.5, 0.25].map((p) => ({ logprob: Math.log(p) }))), 1.5);
  near(token.entropy([{ logprob: 0 }]), 0);
  near(token.restOf([{ logprob: Math.log(0.9) }]), 0.1);
  assert.equal(token.restOf([{ logprob: 1e-7 }]), 0, "float32 may sum to more than one");
});

test("written() makes blanks, parts of characters and the end of text visible", () => {
  const written = (text, bytes = [...new TextEncoder().encode(text)]) => token.written({ text, bytes });
  assert.deepEqual(written(" had"), [["blank", "\u00b7"], ["text", "had"]]);
  assert.deepEqual(written("a\r\n\tb"), [["text", "a"], ["blank", "\u240d\u21b5\u2192"], ["text", "b"]]);
  assert.deepEqual(written("\u00b7"), [["text", "\u00b7"]]);
  assert.deepEqual(written("\ufffd", [0xe2, 0x9]), [["bytes", "E2 09"]]);
  assert.deepEqual(written("\ufffd"), [["text", "\ufffd"]], "the real U+FFFD");
  assert.deepEqual(written("", []), [["end", "end of text"]]);
});

test("spoken() names blanks, parts of characters and the end of text", () => {
  const spoken = (text, bytes = [...new TextEncoder().encode(text)]) => token.spoken({ text, bytes });
  assert.equal(spoken(" had"), "'had'");
  assert.equal(spoken("  "), "space, space");
  assert.equal(spoken("\n\n"), "line end, line end");
  assert.equal(spoken("\ufffd", [0xe2]), "part of a character, E2");
  assert.equal(spoken("", []), "end of text");
});

test("percentages have as many digits as necessary", () => {
  const texts = [1, 0.123, 0.0995, 0.0512, 0.00123, 0.00012, 0.00001, 0].map(token.percent);
  const plain = texts.map((text) => text.replaceAll("\u00a0", " "));
  assert.deepEqual(plain, ["100 %", "12 %", "10 %", "5.1 %", "0.1 %", "0.01 %", "< 0.01 %", "0 %"]);
  assert.equal(token.bits(5.0512), "5.1\u00a0bits");
});

function near(found, expected) {
  assert.ok(Math.abs(found - expected) < 1e-12, `${found} is not ${expected}`);
}
