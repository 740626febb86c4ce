// NextToken: when the page requests the distribution of the next token.

import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { NextToken } from "../../app/web/tokens/next-token-bars.js";

test("a request is sent after a typing pause, for the last text only, and once per text", async () => {
  const { next, requests, answers } = setUp(async (text) => text.toUpperCase());
  for (const text of ["a", "ab", "abc"]) {
    next.want(text);
    mock.timers.tick(299);
  }
  assert.deepEqual(requests, []);
  mock.timers.tick(1);
  next.want("abc");
  await settled();
  next.want("abc");
  mock.timers.tick(1000);
  assert.deepEqual([requests, answers], [["abc"], ["ABC"]]);
});

test("a superseded request is aborted, and its response is dropped", async () => {
  const signals = [];
  const { next, answers, errors } = setUp((text, signal) => {
    signals.push(signal);
    return new Promise((resolve) => setTimeout(() => resolve(text), 100));
  });
  next.want("a");
  mock.timers.tick(300);
  next.want("ab");
  assert.ok(signals[0].aborted);
  mock.timers.tick(300);
  await settled();
  mock.timers.tick(100);
  await settled();
  assert.deepEqual([answers, errors], [["ab"], []]);
});

test("stop() drops the pending response, and after an error the same text can be requested again", async () => {
  let broken = true;
  const { next, requests, answers, errors } = setUp(async (text) => {
    if (broken) throw new Error("no");
    return text;
  });
  next.want("a");
  mock.timers.tick(300);
  await settled();
  broken = false;
  next.want("a");
  mock.timers.tick(300);
  next.stop();
  await settled();
  assert.deepEqual([requests.length, answers, errors.map(({ message }) => message)], [2, [], ["no"]]);
});

function setUp(ask) {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  const [requests, answers, errors] = [[], [], []];
  const recorded = (text, signal) => (requests.push(text), ask(text, signal));
  const next = new NextToken(recorded, { onanswer: (token) => answers.push(token), onerror: (error) => errors.push(error) });
  return { next, requests, answers, errors };
}

async function settled() {
  for (let turn = 0; turn < 5; turn++) await Promise.resolve();
}
