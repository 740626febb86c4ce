// Receipts: read and written exactly, turned into settings, and compared between runs.

import assert from "node:assert/strict";
import test from "node:test";
import { compared, digest, readReceipt, receiptJson, replay, rowsOf, taken, typedOf } from "../../app/web/request/receipt-facts.js";

const JSON_TEXT = `{"weights_version": "abc", "seed": 9007199254740993, "settings": {"temperature": 0.7, "top_k": 0,
  "logit_bias": {}, "stop": ["\\n", "\\"seed\\": 1"], "stop_token_ids": [], "ignore_eos": false, "logprobs": 5, "echo": false,
  "truncate_prompt_tokens": null, "regex": null, "max_tokens": 4}, "numerics": "torch-float32", "version": "0.1.0"}`;
const PARAMETERS = [
  { name: "stop", kind: "texts" },
  { name: "logit_bias", kind: "json" },
  { name: "ignore_eos", kind: "boolean" },
];

test("a receipt is read and written with every digit of its seed", () => {
  const receipt = readReceipt(JSON_TEXT);
  assert.equal(receipt.seed, "9007199254740993");
  const written = receiptJson(receipt);
  assert.ok(written.includes('\n  "seed": 9007199254740993,\n'), written);
  assert.deepEqual(readReceipt(written), receipt);
  assert.deepEqual(JSON.parse(written), JSON.parse(JSON_TEXT));
  assert.deepEqual(readReceipt(`{"id": "x", "receipt": ${JSON_TEXT}}`), receipt, "a whole response contains the receipt");
});

test("a receipt gives the settings and the seed to type to repeat the run", () => {
  assert.deepEqual(typedOf(readReceipt(JSON_TEXT), PARAMETERS), {
    temperature: "0.7",
    top_k: "0",
    stop: '\\n\n"seed": 1',
    ignore_eos: "false",
    max_tokens: "4",
    seed: "9007199254740993",
  });
});

test("an invalid receipt is reported in words", () => {
  const wrong = {
    "This is no JSON": ["", "seed: 5", "{"],
    "A receipt is the JSON": ["1", "null", "[]", '"text"', '{"receipt": 5}'],
    "has no weights_version and no settings": ['{"seed": 1}'],
    "seed of this receipt is no whole number": ['"abc"', "1.5"].map((seed) => JSON_TEXT.replace(/\d{16}/, seed)),
    "settings of this receipt are no object": ['{"weights_version": "a", "seed": 1, "settings": [1]}'],
  };
  for (const [words, texts] of Object.entries(wrong)) {
    for (const text of texts) assert.throws(() => readReceipt(text), new RegExp(words), text);
  }
});

const run = (text, others = {}) => ({ text, receipt: { weights_version: "a", numerics: "n", version: "1", ...others } });

test("equal texts are reported as the same", () => {
  const { same, at, sentence } = compared(run("caf\u00e9 \u{1f600}"), run("caf\u00e9 \u{1f600}"));
  assert.deepEqual([same, at, sentence], [true, null, "The same text, to the letter: 6 characters."]);
});

test("a different text is reported from its first differing character, with a possible reason", () => {
  const other = compared(run("the cat sat"), run("the cow sat", { weights_version: "b" }));
  assert.deepEqual([other.same, other.at], [false, 5]);
  assert.match(other.sentence, /from character 6 on: .at sat. became .ow sat.\. .* that the weights are others\./);
  const both = compared(run("a"), run("b", { numerics: "m", version: "2" }));
  assert.match(both.sentence, /computed otherwise, and that the service/);
  assert.match(compared(run("a"), run("b")).sentence, /the hardware may be another/);
});

test("texts diverge between characters, never inside one", () => {
  assert.equal(compared(run("x\u{1f600}"), run("x\u{1f601}")).at, 1);
  assert.match(compared(run("\u{1f600}a"), run("\u{1f600}b")).sentence, /from character 2 on/);
});

test("a run that was stopped early is compared up to its end", () => {
  assert.match(compared(run("Once"), run("Once upon")).sentence, /as far as the first run went: 4 characters of 9/);
  assert.match(compared(run("Once upon"), run("O")).sentence, /as far as the replay went: 1 character of 9/);
});

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
  const requests = [];
  async function* complete(prompt, typed, signal) {
    requests.push({ prompt, typed, signal });
    yield* events;
  }
  const result = await replay(RUN, { complete, parameters: [{ name: "logit_bias", kind: "json" }], signal: "a signal" });
  return { requests, ...result };
}

const token = (index, text) => ({ type: "token", data: { index, text } });
const DONE = { type: "done", data: { receipt: RECEIPT } };

test("a replay sends the same prompt with the seed and all settings of the receipt", async () => {
  const { requests } = await replayed(DONE);
  const typed = { temperature: "0.5", n: "2", seed: "9007199254740993", logit_bias: '{"5":-1}', suffix: "the end" };
  assert.deepEqual(requests, [{ prompt: "Once", typed, signal: "a signal" }]);
});

test("line ends are compared after normalization", async () => {
  const again = async (...texts) => replayed(...texts.map((text) => token(1, text)), DONE);
  assert.equal((await again(" up\r", "\non")).same, false);
  RUN.text = " up\non";
  assert.ok((await again(" up\r", "\non")).same);
  RUN.text = " upon";
});

test("only the continuation that was kept is compared", async () => {
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
  assert.equal(taken(RECEIPT, here), "The settings and the seed come from the receipt.");
  assert.match(taken(RECEIPT, { ...here, weights_version: "sha256:b" }), /weights here are others/);
  assert.match(taken(RECEIPT, { ...here, numerics: "native-int8" }), /computed by torch-float32, here it is native-int8/);
  assert.match(taken(RECEIPT, { ...here, prompt_sha256: "x" }), /another text than this one/);
  assert.equal(taken(RECEIPT, { prompt_sha256: null }), taken(RECEIPT, here), "an unknown fact is not reported as a difference");
  assert.match(taken({ ...RECEIPT, settings: { truncate_prompt_tokens: 7 } }, here), /cut to the last 7 tokens/);
  assert.equal(await digest("Once"), "d88f6d8372f4d54ecfa210948ad8f8fccf83984881e298b673c8f1a941e2aa33");
});
