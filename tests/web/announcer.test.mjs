// Announcer: what it announces, and how often. The tests control the clock.
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

test("sentences are announced when they are complete", () => {
  for (const token of ["It", " rained", ".", " Then"]) announcer.stream(token);
  assert.deepEqual(spoken, ["It rained."]);
  mock.timers.tick(1000);
  announcer.end();
  assert.deepEqual(spoken, ["It rained.", "Then"]);
});

test("announcements within a second are joined", () => {
  announcer.stream("One. Two. Three. Four");
  announcer.say("3 continuations");
  assert.deepEqual(spoken, ["One."]);
  mock.timers.tick(999);
  assert.equal(spoken.length, 1);
  mock.timers.tick(1);
  assert.deepEqual(spoken, ["One.", "Two. Three. 3 continuations"]);
  mock.timers.tick(1000);
  announcer.end();
  assert.deepEqual(spoken.at(-1), "Four", "after a second without announcements the next is immediate");
});

test("muting silences text but not messages, and unmuting continues with the next sentence", () => {
  announcer.muted = true;
  announcer.stream("One. Two. Thr");
  announcer.say("continuation 2 ended");
  announcer.muted = false;
  announcer.stream("ee. Four");
  mock.timers.tick(1000);
  assert.deepEqual(spoken, ["continuation 2 ended", "Three."]);
});
