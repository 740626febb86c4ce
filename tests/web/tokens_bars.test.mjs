// When the next token is asked for.

import assert from "node:assert/strict";
import { mock, test } from "node:test";
import { NextToken } from "../../app/web/tokens/bars.js";

test("it asks once the hand rests, for the last text only, and never twice for the same", async () => {
  const { next, asked, answers } = setUp(async (text) => text.toUpperCase());
  for (const text of ["a", "ab", "abc"]) {
    next.want(text);
    mock.timers.tick(299);
  }
  assert.deepEqual(asked, []);
  mock.timers.tick(1);
  next.want("abc");
  await settled();
  next.want("abc");
  mock.timers.tick(1000);
  assert.deepEqual([asked, answers], [["abc"], ["ABC"]]);
});

test("a superseded request is aborted, and its answer is dropped", async () => {
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

test("after stop() nothing comes; after an error the same text may be asked for again", async () => {
  let broken = true;
  const { next, asked, answers, errors } = setUp(async (text) => {
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
  assert.deepEqual([asked.length, answers, errors.map(({ message }) => message)], [2, [], ["no"]]);
});

function setUp(ask) {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  const [asked, answers, errors] = [[], [], []];
  const recorded = (text, signal) => (asked.push(text), ask(text, signal));
  const next = new NextToken(recorded, { onanswer: (token) => answers.push(token), onerror: (error) => errors.push(error) });
  return { next, asked, answers, errors };
}

async function settled() {
  for (let turn = 0; turn < 5; turn++) await Promise.resolve();
}
