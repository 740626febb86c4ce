// What is announced, and how often. The clock is the test's.
import assert from "node:assert/strict";
import { beforeEach, mock, test } from "node:test";
import { Announcer } from "../../app/web/text/announcer.js";

let spoken, announcer;

beforeEach(() => {
  mock.timers.reset();
  mock.timers.enable({ apis: ["setTimeout"] });
  spoken = [];
  announcer = new Announcer({ set textContent(text) { spoken.push(text); } });
});

test("a sentence is announced when it is whole, never a token", () => {
  for (const token of ["It", " rained", ".", " Then"]) announcer.stream(token);
  assert.deepEqual(spoken, ["It rained."]);
  mock.timers.tick(1000);
  announcer.end();
  assert.deepEqual(spoken, ["It rained.", "Then"]);
});

test("at most one announcement a second: what comes sooner is joined", () => {
  announcer.stream("One. Two. Three. Four");
  announcer.say("3 continuations");
  assert.deepEqual(spoken, ["One."]);
  mock.timers.tick(999);
  assert.equal(spoken.length, 1);
  mock.timers.tick(1);
  assert.deepEqual(spoken, ["One.", "Two. Three. 3 continuations"]);
  mock.timers.tick(1000);
  announcer.end();
  assert.deepEqual(spoken.at(-1), "Four", "a quiet second, and the next is announced at once");
});

test("muted, the text is silent and messages are not; unmuted it goes on with the next sentence", () => {
  announcer.muted = true;
  announcer.stream("One. Two. Thr");
  announcer.say("continuation 2 ended");
  announcer.muted = false;
  announcer.stream("ee. Four");
  mock.timers.tick(1000);
  assert.deepEqual(spoken, ["continuation 2 ended", "Three."]);
});
