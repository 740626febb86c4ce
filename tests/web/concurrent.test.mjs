// concurrently() in request/completion.js: runs several completions as one; each may end or fail separately.

import assert from "node:assert/strict";
import test from "node:test";
import { CompletionError, concurrently } from "../../app/web/request/completion.js";

async function* run(...events) {
  for (const event of events) {
    await new Promise(setImmediate);
    if (event instanceof Error) throw event;
    yield event;
  }
}

const start = { type: "start", data: { seed: "7" } };
const token = (text) => ({ type: "token", data: { index: 0, text } });
const done = (seed) => ({ type: "done", data: { choices: [{ index: 0, finish_reason: "stop" }], receipt: { seed }, usage: { completion_tokens: 2 } } });

async function all(...streams) {
  const events = [];
  for await (const event of concurrently(streams)) events.push(event);
  return events;
}

test("tokens carry the index of their run, and start and done come once", async () => {
  const events = await all(run(start, token("a"), token("b"), done("1")), run(start, token("c"), done("2")));
  assert.deepEqual(events.filter(({ type }) => type === "start"), [start]);
  const texts = ["", ""];
  for (const { type, data } of events) if (type === "token") texts[data.index] += data.text;
  assert.deepEqual(texts, ["ab", "c"]);
  const [end] = events.filter(({ type }) => type === "done");
  assert.equal(events.at(-1), end);
  assert.deepEqual(end.data.choices, [{ index: 0, finish_reason: "stop" }, { index: 1, finish_reason: "stop" }]);
  assert.deepEqual([end.data.receipts, end.data.usage], [[{ seed: "1" }, { seed: "2" }], { completion_tokens: 4 }]);
});

test("a failed run reports why and does not stop the others", async () => {
  const events = await all(run(start, new CompletionError("Too hot.")), run(start, token("c"), done("2")));
  assert.deepEqual(events.at(-1).data.choices.map((one) => one.finish_reason), ["failed: Too hot.", "stop"]);
});

test("if all runs fail, the first error is thrown; any other kind of error is thrown at once", async () => {
  await assert.rejects(all(run(new CompletionError("First.")), run(new CompletionError("Second."))), { message: "First." });
  await assert.rejects(all(run(start, token("a"), done("1")), run(new TypeError("a bug"))), TypeError);
});
