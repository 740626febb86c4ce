// The tokens that the server did not report.

import assert from "node:assert/strict";
import { test } from "node:test";
import { tail } from "../../app/web/tokens/sampling.js";

test("they are as many as there are, have together what is missing, and none is above the last that was reported", () => {
  for (const [shares, vocabulary] of [[[0.4, 0.2, 0.1], 100], [[0.9, 0.0999], 50257], [[0.01, 0.01], 200], [[0.5], 2]]) {
    const groups = tail(top(shares), vocabulary);
    assert.equal(groups.reduce((sum, { count }) => sum + count, 0), vocabulary - shares.length);
    const share = groups.reduce((sum, { logprob, count }) => sum + Math.exp(logprob) * count, 0);
    assert.ok(Math.abs(share + shares.reduce((sum, one) => sum + one, 0) - 1) < 1e-9, `${shares}: ${share}`);
    const logprobs = [Math.log(shares.at(-1)), ...groups.map(({ logprob }) => logprob)];
    logprobs.slice(1).forEach((logprob, rank) => assert.ok(logprob <= logprobs[rank]));
  }
});

test("a power law is found again", () => {
  const weights = Array.from({ length: 5000 }, (_, rank) => (rank + 1) ** -1.2);
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const groups = tail(top(weights.slice(0, 20).map((weight) => weight / total)), 5000);
  let rank = 20;
  for (const { logprob, count } of groups) {
    const middle = rank + (count + 1) / 2;
    assert.ok(Math.abs(Math.exp(logprob) / (middle ** -1.2 / total) - 1) < 0.02, `rank ${middle}`);
    rank += count;
  }
});

test("where nothing is missing there are none", () => {
  assert.deepEqual(tail(top([0.5, 0.5]), 2), []);
  assert.deepEqual(tail(top([0.6, 0.5]), 9), [], "float32 may sum to more than one");
});

function top(shares) {
  return shares.map((share, id) => ({ id, logprob: Math.log(share) }));
}
