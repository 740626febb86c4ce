// Properties of the filtered distribution; tests/web/test_sampling.py compares it with the server's sampler.

import assert from "node:assert/strict";
import { test } from "node:test";
import { sampled, tail } from "../../app/web/tokens/sampling.js";

const SHARES = [0.4, 0.25, 0.15, 0.1, 0.05, 0.05];

test("without filters it is the model's distribution, with the unreported probability as the rest", () => {
  const { shares, rest, exact } = sampled(top(0.4, 0.2), 100, {});
  near(shares, [0.4, 0.2]);
  near([rest.share, rest.count], [0.4, 98]);
  assert.ok(exact);
});

test("each filter keeps what it is defined to keep", () => {
  const cases = [
    [{ temperature: 0 }, [1, 0, 0, 0, 0, 0]],
    [{ top_k: 1 }, [1, 0, 0, 0, 0, 0]],
    [{ top_p: 0 }, [1, 0, 0, 0, 0, 0]],
    [{ top_k: 2 }, [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0, 0]],
    [{ top_k: 5 }, SHARES], // the sixth ties with the fifth
    [{ top_k: -1 }, SHARES],
    [{ top_p: 0.5 }, [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0, 0]],
    [{ top_p: 0.92 }, SHARES], // a tie again
    [{ min_p: 0.3 }, [0.5, 0.3125, 0.1875, 0, 0, 0]],
    [{ min_p: 1 }, [1, 0, 0, 0, 0, 0]],
    [{ temperature: 0.5 }, SHARES.map((p) => (p * p) / SHARES.reduce((sum, q) => sum + q * q, 0))],
    [{ temperature: 1e-40, top_p: 0.9 }, [1, 0, 0, 0, 0, 0]],
    [{ typical_p: 0.2 }, [0, 1, 0, 0, 0, 0]], // the entropy is 1.52 nats, and -ln 0.25 = 1.39 is nearest to it
  ];
  for (const [settings, expected] of cases) {
    const { shares, rest, exact } = sampled(top(...SHARES), SHARES.length, settings);
    near(shares, expected, JSON.stringify(settings));
    assert.deepEqual([rest, exact], [{ share: 0, count: 0 }, true]);
  }
});

test("top_p applies to what temperature and top_k keep", () => {
  const { shares } = sampled(top(...SHARES), 6, { top_k: 3, top_p: 0.8 });
  near(shares, [0.4 / 0.65, 0.25 / 0.65, 0, 0, 0, 0]); // 0.65 / 0.8 exceeds 0.8; 0.65 alone does not
});

test("filters remove all or some of the unreported tokens", () => {
  const first = top(0.4, 0.2, 0.1); // 0.3 for 97 others
  near([sampled(first, 100, { top_k: 13 }).rest.count], [10]);
  const { rest, shares } = sampled(first, 100, { top_p: 0.85 });
  assert.ok(rest.count > 1 && rest.count < 97 / 2, "the more probable half of the rest has fewer tokens");
  assert.ok(Math.abs(rest.share + shares[0] + shares[1] + shares[2] - 1) < 1e-12);
  assert.deepEqual(sampled(first, 100, { min_p: 0.2 }).rest, { share: 0, count: 0 });
});

test("the result is not exact where unreported tokens might change it", () => {
  const first = top(0.5, 0.2, 0.1); // an unreported token may have 0.1 too
  const exact = (settings) => sampled(first, 100, settings).exact;
  for (const settings of [{}, { temperature: 0 }, { top_k: 2 }, { top_p: 0.6 }, { min_p: 0.5, temperature: 2 }, { top_p: 0 }]) {
    assert.ok(exact(settings), JSON.stringify(settings));
  }
  for (const settings of [
    { temperature: 0.9 },
    { top_k: 3 }, // an unreported token may tie with the third
    { top_k: 4 },
    { top_p: 0.75 },
    { top_p: 0.9 },
    { min_p: 0.1 },
    { typical_p: 0.5 },
    { temperature: 0.5, top_p: 0.6 },
  ]) {
    assert.ok(!exact(settings), JSON.stringify(settings));
  }
});

test("tail() has the right number of unreported tokens and their total probability, and none exceeds the last reported one", () => {
  for (const [shares, vocabulary] of [[[0.4, 0.2, 0.1], 100], [[0.9, 0.0999], 50257], [[0.01, 0.01], 200], [[0.5], 2]]) {
    const groups = tail(top(...shares), vocabulary);
    assert.equal(groups.reduce((sum, { count }) => sum + count, 0), vocabulary - shares.length);
    const share = groups.reduce((sum, { logprob, count }) => sum + Math.exp(logprob) * count, 0);
    assert.ok(Math.abs(share + shares.reduce((sum, one) => sum + one, 0) - 1) < 1e-9, `${shares}: ${share}`);
    const logprobs = [Math.log(shares.at(-1)), ...groups.map(({ logprob }) => logprob)];
    logprobs.slice(1).forEach((logprob, rank) => assert.ok(logprob <= logprobs[rank]));
  }
});

test("tail() recovers a power law", () => {
  const weights = Array.from({ length: 5000 }, (_, rank) => (rank + 1) ** -1.2);
  const total = weights.reduce((sum, weight) => sum + weight, 0);
  const groups = tail(top(...weights.slice(0, 20).map((weight) => weight / total)), 5000);
  let rank = 20;
  for (const { logprob, count } of groups) {
    const middle = rank + (count + 1) / 2;
    assert.ok(Math.abs(Math.exp(logprob) / (middle ** -1.2 / total) - 1) < 0.02, `rank ${middle}`);
    rank += count;
  }
});

test("tail() is empty if the reported tokens have all of the probability", () => {
  assert.deepEqual(tail(top(0.5, 0.5), 2), []);
  assert.deepEqual(tail(top(0.6, 0.5), 9), [], "float32 may sum to more than one");
});

function top(...shares) {
  return shares.map((share, id) => ({ id, logprob: Math.log(share) }));
}

function near(found, expected, message) {
  assert.equal(found.length, expected.length);
  found.forEach((value, index) => assert.ok(Math.abs(value - expected[index]) < 1e-9, `${message}: ${found}`));
}
