// notebook.js with a scripted server: its state after runs that finish, stop or fail.

import assert from "node:assert/strict";
import test from "node:test";

import { Notebook } from "../../app/web/notebook.js";
import { Tree } from "../../app/web/text/tree.js";

const token = (text, index = 0) => ({ type: "token", data: { index, text } });
const DONE = { type: "done", data: { choices: [{ index: 0, finish_reason: "length" }], receipt: { seed: "7" } } };

function notebook(...events) {
  const requests = [];
  const viewCalls = [];
  async function* complete(prompt, typed, signal) {
    requests.push({ prompt, typed });
    for (const event of events) {
      if (event === "hang") await new Promise((_, reject) => signal.addEventListener("abort", () => reject(signal.reason)));
      if (event instanceof Error) throw event;
      yield event;
    }
  }
  const names = ["changed", "labeled", "began", "received", "wrote", "ended"];
  const view = Object.fromEntries(names.map((name) => [name, (...args) => viewCalls.push([name, ...args])]));
  const book = new Notebook(complete, view, new Tree({ text: "Once", units: [] }));
  return { book, requests, viewCalls, ended: () => viewCalls.findLast(([name]) => name === "ended")[1] };
}

test("a run is one undo step, recorded with its facts", async () => {
  const { book, requests, ended } = notebook({ type: "start", data: { seed: "7" } }, token(" upon"), token(" a"), DONE);
  await book.generate({ temperature: "0.5" });
  assert.deepEqual(requests, [{ prompt: "Once", typed: { temperature: "0.5" } }]);
  assert.equal(book.text, "Once upon a");
  assert.deepEqual(book.written, [[4, 11]]);
  const [node] = ended().nodes;
  const logprobs = { from: 4, lengths: [5, 2], values: [null, null] }; // not reported by the service
  const facts = { typed: { temperature: "0.5" }, count: 2, at: 4, index: 0, seed: "7", finish: "length", receipt: { seed: "7" } };
  assert.deepEqual(node.facts, { ...facts, logprobs });
  book.undo();
  assert.equal(book.text, "Once");
  book.redo();
  assert.equal(book.text, "Once upon a");
});

test("stop keeps the text received, and nothing else can run meanwhile", async () => {
  const { book, requests, ended } = notebook(token(" upon"), "hang");
  const run = book.generate({});
  await new Promise(setImmediate);
  book.generate({});
  book.undo();
  book.open("other");
  assert.ok(book.running && !book.canUndo);
  book.stop();
  await run;
  assert.equal(requests.length, 1);
  assert.deepEqual([book.text, ended().stopped, ended().error], ["Once upon", true, null]);
  assert.ok(book.canUndo);
});

test("an error is reported; received text is a step, and an empty run is not", async () => {
  const some = notebook(token(" upon"), new Error("It broke."));
  await some.book.generate({});
  assert.equal(some.ended().error.message, "It broke.");
  assert.equal(some.book.text, "Once upon");
  const none = notebook(new Error("Refused."));
  await none.book.generate({});
  assert.deepEqual([none.ended().nodes, none.book.canUndo], [[null], false]);
});

test("regenerate restarts the last run, whatever was typed after it", async () => {
  const { book, requests } = notebook(token(" upon"), DONE);
  await book.generate({});
  book.type("Once upon!");
  await book.regenerate({});
  assert.deepEqual(requests.map(({ prompt }) => prompt), ["Once", "Once"]);
  assert.equal(book.text, "Once upon");
  assert.equal(book.tree.children(0).length, 2);
});

test("picking a token truncates the text, and the run continues after it as one step", async () => {
  const { book, requests, viewCalls } = notebook(token(" upon"), token(" a"), DONE);
  await book.generate({});
  const other = { id: 9, text: " more", bytes: [], logprob: -2, top: [] };
  await book.pick(4, other, { n: "3" });
  assert.equal(requests[1].prompt, "Once more");
  assert.equal(requests[1].typed.n, "", "one continuation whatever the setting");
  assert.equal(book.text, "Once more upon a");
  assert.deepEqual(book.units[0].tokens, [other]);
  assert.ok(viewCalls.some(([name]) => name === "changed"));
  book.undo();
  assert.equal(book.text, "Once upon a");
});

test("regenerate after a picked token restarts after that token", async () => {
  const { book, requests } = notebook(token(" upon"), DONE);
  await book.pick(2, { id: 9, text: "!", bytes: [33], logprob: -2, top: [] }, {});
  await book.regenerate({ n: "3" });
  assert.deepEqual(requests.map(({ prompt }) => prompt), ["On!", "On!"]);
  assert.equal(requests[1].typed.n, "");
  assert.equal(book.text, "On! upon");
  book.undo();
  assert.equal(book.text, "Once");
  assert.equal(book.tree.children(0).length, 2);
});

test("soFar includes the text of a run in progress, without changing the notebook", async () => {
  for (const [n, texts] of [["1", ["Once", "Once upon!"]], ["2", ["Once", "Once upon", "Once!"]]]) {
    const { book } = notebook(token(" upon", 0), token("!", Number(n) - 1), "hang");
    const run = book.generate({ n });
    await new Promise(setImmediate);
    const { data } = book.soFar;
    const again = Tree.from(JSON.parse(JSON.stringify(data)));
    assert.deepEqual(data.nodes.map(({ id }) => again.node(id).state.text), texts);
    assert.equal(again.current.state.text, n === "1" ? "Once upon!" : "Once");
    assert.ok(book.running && book.tree.data.nodes.length === 1);
    book.stop();
    await run;
    assert.deepEqual(book.soFar, book.tree);
    assert.equal(book.tree.data.nodes.length, texts.length);
  }
});

test("a picked token stays if the run after it fails", async () => {
  const { book } = notebook(new Error("Refused."));
  await book.pick(2, { text: "!", top: [] }, {});
  assert.equal(book.text, "On!");
  book.undo();
  assert.equal(book.text, "Once");
});

test("n drafts are branches; one can be taken", async () => {
  const done = { type: "done", data: { choices: [0, 1].map((index) => ({ index, finish_reason: "stop" })) } };
  const { book, ended, viewCalls } = notebook(token(" upon", 0), token(" more", 1), token("!", 1), done);
  await book.generate({ n: "2" });
  assert.equal(book.text, "Once", "no draft is taken yet");
  const { nodes } = ended();
  assert.deepEqual(nodes.map(({ state }) => state.text), ["Once upon", "Once more!"]);
  assert.deepEqual(viewCalls.filter(([name]) => name === "wrote").map(([, index, , text]) => [index, text]), [[0, " upon"], [1, " more"], [1, "!"]]);
  book.go(nodes[1].id);
  assert.equal(book.text, "Once more!");
  book.undo();
  assert.equal(book.text, "Once");
});

test("pasting is a separate step, and the end of a sentence or a line ends a step", () => {
  const { book } = notebook();
  for (const text of ["Once u", "Once up. ", "Once up. H"]) book.type(text);
  book.type("Once up. He pasted this", true);
  for (const text of ["Once up. He pasted this t", "Once up. He pasted this t\n", "Once up. He pasted this t\nx"]) book.type(text);
  const steps = [];
  for (; book.canUndo; book.undo()) steps.push(book.text);
  const pasted = "Once up. He pasted this";
  assert.deepEqual(steps, [`${pasted} t\nx`, `${pasted} t\n`, pasted, "Once up. H", "Once up. "]);
});

test("a comparison records the settings, the preset and the receipt of each run", async () => {
  const choices = [{ index: 0, finish_reason: "stop" }, { index: 1, finish_reason: "length" }];
  const { book, requests, viewCalls, ended } = notebook(token(" a", 0), token(" b", 1), { type: "done", data: { choices, receipts: ["r0", "r1"] } });
  const variants = [{ name: "Cold", typed: { temperature: "0.1" } }, { name: "Hot", typed: { temperature: "2" } }];
  await book.compare(variants);
  assert.deepEqual(requests[0].typed, variants.map(({ typed }) => typed));
  assert.deepEqual(viewCalls.find(([name]) => name === "began").slice(1), [2, requests[0].typed, ["Cold", "Hot"], null]);
  const facts = ended().nodes.map((node) => node.facts);
  assert.deepEqual(facts.map(({ preset, typed, receipt }) => ({ name: preset, typed, receipt })), [
    { ...variants[0], receipt: "r0" },
    { ...variants[1], receipt: "r1" },
  ]);
});

test("an insertion sends the text before it, and the suffix to an infill model; it is one step, and can be regenerated", async () => {
  for (const isInfill of [true, false]) {
    const { book, requests, ended } = notebook(token("pon"), token(" a"), DONE);
    book.open("Once u time");
    await book.generate({ n: "1" }, { start: 6, end: 6, isInfill });
    assert.deepEqual(requests[0], { prompt: "Once u", typed: { n: "1", ...(isInfill && { suffix: " time" }) } });
    assert.equal(book.text, "Once upon a time");
    assert.deepEqual(book.written, [[6, 11]]);
    const [{ facts }] = ended().nodes;
    assert.deepEqual([facts.at, facts.span, facts.typed], [6, { start: 6, end: 6, isInfill, until: 11 }, { n: "1" }]);
    await book.regenerate({ n: "1" });
    assert.deepEqual(requests[1], requests[0]);
    assert.equal(book.text, "Once upon a time");
    book.undo();
    assert.equal(book.text, "Once u time");
  }
});

test("alternatives to a selection are trimmed to fit and become branches; without one the text stays", async () => {
  const { book, ended } = notebook(token(" Two", 0), token(" Three. Fo", 1), token(".", 0));
  book.open("One. x. Four.");
  await book.generate({ n: "2" }, { start: 4, end: 7, isInfill: false });
  assert.deepEqual(ended().nodes.map(({ state }) => state.text), ["One. Two. Four.", "One. Three. Four."]);
  assert.equal(book.text, "One. x. Four.");
  book.go(ended().nodes[1].id);
  book.undo();
  assert.equal(book.text, "One. x. Four.");
  for (const n of ["1", "2"]) {
    const none = notebook(new Error("Refused."));
    await none.book.generate({ n }, { start: 1, end: 3, isInfill: true });
    assert.deepEqual([none.book.text, none.book.canUndo, none.ended().nodes.some(Boolean)], ["Once", false, false]);
  }
});

test("soFar includes the text of an insertion in progress", async () => {
  const { book } = notebook(token("X"), "hang");
  const run = book.generate({}, { start: 2, end: 2, isInfill: false });
  await new Promise(setImmediate);
  assert.equal(book.soFar.current.state.text, "OnXce");
  assert.equal(book.soFar.current.facts.span.until, 3);
  book.stop();
  await run;
  assert.equal(book.text, "OnX ce");
});
