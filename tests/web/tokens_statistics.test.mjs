// The token table, its CSV export, and the curves along the text.

import assert from "node:assert/strict";
import { test } from "node:test";
import { tint } from "../../app/web/tokens/mark-scale.js";
import { binned, csv, rates, tokenTable } from "../../app/web/tokens/statistics.js";

const token = (id, text, share, top = []) => ({
  id,
  text,
  bytes: [...new TextEncoder().encode(text)],
  logprob: share === null ? null : Math.log(share),
  top,
});
const other = token(9, " other", 0.5);

test("the table has each token's author, and the CSV all of its data", () => {
  const second = token(2, ' =1+"2"', 0.25);
  second.top = [other, second];
  const units = [
    { start: 0, end: 2, tokens: [token(1, "It", null)] },
    { start: 2, end: 9, tokens: [second] },
  ];
  const table = tokenTable('It =1+"2"', units, [[2, 9]], (one) => (one === second ? 12.34 : undefined));
  assert.deepEqual(table.map(({ isWritten }) => isWritten), [false, true]);
  const lines = csv(table).split("\r\n");
  assert.equal(lines.length, 4);
  assert.equal(lines[1], '0,2,user,1,"""It""",,,,,,');
  const cells = lines[2].split(",");
  assert.equal(lines[2].slice(0, 35), '2,9,model,2,""" =1+\\""2\\""""",0.25,');
  assert.deepEqual(cells.slice(-4), ["2", "2", "1.5", "12.3"]);
});

test("bins are means of the known values, at most as many as requested", () => {
  assert.deepEqual(binned([1, 3, null, 5, null, null], 3), [2, 5, null]);
  assert.deepEqual(binned([7], 100), [7]);
  assert.deepEqual(binned([], 100), []);
});

test("speed is averaged over a span, and unknown if a time in it is missing", () => {
  const table = [undefined, 10, 10, 20, undefined, 0].map((ms) => ({ ms }));
  assert.deepEqual(rates(table, 2), [null, null, 100, 2000 / 30, null, null]);
});

test("each measure has its own tint steps, and unknown values have no tint", () => {
  const second = token(2, " a", 0.25);
  second.top = [other, second];
  assert.equal(tint([second], "probability"), "tint-1");
  assert.equal(tint([second], "rank"), "tint-1");
  assert.equal(tint([second], "entropy"), "tint-1");
  assert.equal(tint([token(2, " a", 0.6)], "probability"), "tint-0");
  assert.equal(tint([token(2, " a", 0)], "probability"), "tint-5");
  assert.equal(tint([{ ...second, top: [other] }], "rank"), "tint-5");
  assert.equal(tint([token(2, " a", 0.25)], "rank"), "");
  assert.equal(tint([token(2, " a", null, [other])], "entropy"), "");
});
