// A replay sends what the receipt says, reads the text of its own continuation, and reports the result.

import assert from "node:assert/strict";
import test from "node:test";
import { digest, rowsOf, taken } from "../../app/web/request/receipt-facts.js";
import { replay } from "../../app/web/request/replay.js";

const RECEIPT = {
  weights_version: "sha256:abcdef0123456789",
  seed: "9007199254740993",
  settings: { temperature: 0.5, n: 2, stop: [], regex: null, logprobs: 5, logit_bias: { 5: -1 } },
  prompt_sha256: "d88f6d8372f4d54e",
  numerics: "torch-float32",
  version: "0.1.0",
};
const RUN = { prompt: "Once", text: " upon", index: 1, typed: { temperature: "", suffix: "the end" }, receipt: RECEIPT };

async function replayed(...events) {
  const asked = [];
  async function* complete(prompt, typed, signal) {
    asked.push({ prompt, typed, signal });
    yield* events;
  }
  const result = await replay(RUN, { complete, parameters: [{ name: "logit_bias", kind: "json" }], signal: "a signal" });
  return { asked, ...result };
}

const token = (index, text) => ({ type: "token", data: { index, text } });
const DONE = { type: "done", data: { receipt: RECEIPT } };

test("the same prompt goes out with the seed and all settings of the receipt", async () => {
  const { asked } = await replayed(DONE);
  const typed = { temperature: "0.5", n: "2", seed: "9007199254740993", logit_bias: '{"5":-1}', suffix: "the end" };
  assert.deepEqual(asked, [{ prompt: "Once", typed, signal: "a signal" }]);
});

test("line ends are compared as the document has them", async () => {
  const again = async (...texts) => replayed(...texts.map((text) => token(1, text)), DONE);
  assert.equal((await again(" up\r", "\non")).same, false);
  RUN.text = " up\non";
  assert.ok((await again(" up\r", "\non")).same);
  RUN.text = " upon";
});

test("the continuation that was kept is compared, and no other", async () => {
  const { same, sentence } = await replayed(token(0, "not"), token(1, " up"), token(0, "this"), token(1, "on"), DONE);
  assert.ok(same);
  assert.match(sentence, /^The same text, to the letter: 5 characters/);
  assert.equal((await replayed(token(1, " under"), DONE)).at, 2);
});

test("a receipt is shown in rows, without empty fields", () => {
  const rows = rowsOf(RECEIPT);
  assert.deepEqual(rows.slice(0, 3), [
    ["seed", "9007199254740993", ""],
    ["weights", "abcdef012345", "sha256:abcdef0123456789"],
    ["prompt", "d88f6d8372f4", "d88f6d8372f4d54e"],
  ]);
  const settings = rows.slice(4).map(([name, value]) => `${name} ${value}`);
  assert.deepEqual(settings, ["temperature 0.5", "n 2", "logprobs 5", 'logit_bias {"5":-1}']);
});

test("differences that may prevent the same text are reported", async () => {
  const { weights_version, numerics, prompt_sha256 } = RECEIPT;
  const here = { weights_version, numerics, prompt_sha256 };
  assert.equal(taken(RECEIPT, here), "The settings and the seed are those of the receipt.");
  assert.match(taken(RECEIPT, { ...here, weights_version: "sha256:b" }), /weights here are others/);
  assert.match(taken(RECEIPT, { ...here, numerics: "native-int8" }), /computed by torch-float32, here it is native-int8/);
  assert.match(taken(RECEIPT, { ...here, prompt_sha256: "x" }), /another text than this one/);
  assert.equal(taken(RECEIPT, { prompt_sha256: null }), taken(RECEIPT, here), "an unknown fact is not reported as a difference");
  assert.match(taken({ ...RECEIPT, settings: { truncate_prompt_tokens: 7 } }, here), /cut to the last 7 tokens/);
  assert.equal(await digest("Once"), "d88f6d8372f4d54ecfa210948ad8f8fccf83984881e298b673c8f1a941e2aa33");
});
