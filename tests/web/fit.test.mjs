// fit.js: what a model wrote into the middle of a text, made to fit in there.

import assert from "node:assert/strict";
import test from "node:test";

import { fit, rewritten } from "../../app/web/text/fit.js";

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
