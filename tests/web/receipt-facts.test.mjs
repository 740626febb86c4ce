// A receipt is read to the last digit, becomes settings again, and two runs are compared to the letter.

import assert from "node:assert/strict";
import test from "node:test";
import { compared, readReceipt, receiptJson, typedOf } from "../../app/web/request/receipt-facts.js";

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
  assert.deepEqual(readReceipt(`{"id": "x", "receipt": ${JSON_TEXT}}`), receipt, "a whole answer does, too");
});

test("its settings and its seed are what one would type to send it again", () => {
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

test("the same text is the same to the letter", () => {
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

test("texts part between characters, never inside of one", () => {
  assert.equal(compared(run("x\u{1f600}"), run("x\u{1f601}")).at, 1);
  assert.match(compared(run("\u{1f600}a"), run("\u{1f600}b")).sentence, /from character 2 on/);
});

test("a run that was stopped early is the same as far as it went", () => {
  assert.match(compared(run("Once"), run("Once upon")).sentence, /as far as the first run went: 4 characters of 9/);
  assert.match(compared(run("Once upon"), run("O")).sentence, /as far as the replay went: 1 character of 9/);
});
