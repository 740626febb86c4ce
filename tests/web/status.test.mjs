// The line under the text: what the service measured replaces what the browser counted.

import assert from "node:assert/strict";
import { test } from "node:test";

import { Status } from "../../app/web/status.js";

function element() {
  return { dataset: {}, style: {}, title: "", textContent: "", firstChild: null, addEventListener() {} };
}

function run(timings) {
  const numbers = Object.fromEntries(["firstToken", "rate", "count", "context", "seed"].map((name) => [name, element()]));
  const status = new Status(element(), element(), numbers);
  globalThis.performance ??= { now: () => 0 };
  status.sent();
  status.started({ seed: 7, prompt_tokens: 3 });
  status.done({ choices: [{ finish_reason: "length" }], usage: { completion_tokens: 9 }, timings });
  return { status, numbers };
}

test("the rate says how many drafts were right", () => {
  const { status, numbers } = run({ tokens_per_second: 120, drafted_tokens: 40, accepted_tokens: 31 });
  assert.equal(numbers.rate.textContent, "120");
  assert.equal(numbers.rate.title, "31 of 40 tokens that were guessed ahead were right");
  status.sent();
  assert.equal(numbers.rate.title, "", "the next run has none yet");
});

test("without drafts it says nothing of them", () => {
  assert.equal(run({ tokens_per_second: 120, drafted_tokens: 0, accepted_tokens: 0 }).numbers.rate.title, "");
  assert.equal(run(undefined).numbers.rate.title, "");
});
