// completion.js with a scripted fetch: errors, waiting, and streams over several connections.

import assert from "node:assert/strict";
import { mock, test } from "node:test";

import { complete, CompletionError } from "../../app/web/request/completion.js";

const START = 'id: r-1:0\nevent: start\ndata: {"seed": 9007199254740993}\n\n';
const token = (n, text) => `id: r-1:${n}\nevent: token\ndata: {"text": "${text}"}\n\n`;
const DONE = 'id: r-1:9\nevent: done\ndata: {"choices": [], "receipt": {"seed": 9007199254740993}}\n\n';

function body(text, breaks = false) {
  return new ReadableStream({
    start(controller) {
      controller.enqueue(new TextEncoder().encode(text));
    },
    pull(controller) {
      if (breaks) controller.error(new TypeError("network error"));
      else controller.close();
    },
  });
}

const busy = (seconds) =>
  new Response('{"error": {"message": "The queue is full"}}', { status: 503, headers: { "Retry-After": String(seconds) } });

// Returns the responses in turn, and throws Errors. Timers fire at once, so that no test waits.
async function run(responses, { signal = new AbortController().signal, stopAt = null } = {}) {
  const requests = [];
  mock.method(globalThis, "fetch", async (path, options) => {
    requests.push([options.method ?? "GET", path, options.headers, options.body]);
    const response = options.method === "DELETE" ? new Response("{}") : responses.shift();
    if (response instanceof Error) throw response;
    return response;
  });
  mock.method(globalThis, "setTimeout", (callback) => setImmediate(callback));
  const events = [];
  let error = null;
  try {
    for await (const event of complete("Once", {}, signal)) {
      events.push(event);
      if (event.type === stopAt) break;
    }
  } catch (thrown) {
    error = thrown;
  } finally {
    mock.restoreAll();
  }
  return { events, requests, error, text: events.map(({ data }) => data.text ?? "").join("") };
}

test("one connection yields all events, with every digit of the seed", async () => {
  const { events, error } = await run([new Response(body(START + token(1, " upon") + DONE))]);
  assert.equal(error, null);
  assert.deepEqual(events.map(({ type }) => type), ["start", "token", "done"]);
  assert.equal(events[0].data.seed, "9007199254740993");
  assert.equal(events[2].data.receipt.seed, "9007199254740993");
});

for (const [how, breaks] of [["breaks", true], ["just ends", false]]) {
  test(`after a connection that ${how} the stream resumes after the last event`, async () => {
    const { events, requests, error, text } = await run([
      new Response(body(START + token(1, " upon") + "id: r-1:2\ndata: half", breaks)),
      new TypeError("Failed to fetch"),
      new Response("bad gateway", { status: 502 }),
      new Response("bad gateway", { status: 502 }),
      new Response(body(token(2, " a"), breaks)),
      new Response(body(DONE)),
    ]);
    assert.equal(error, null);
    assert.equal(text, " upon a");
    assert.equal(events.filter(({ type }) => type === "lost").length, 4);
    assert.deepEqual(requests.slice(1).map(([method]) => method), ["GET", "GET", "POST", "GET", "GET"]);
    const asked = requests.filter(([method]) => method === "GET");
    assert.deepEqual(asked.map(([, path]) => path), Array(4).fill("complete/r-1/events"));
    assert.deepEqual(asked.map(([, , headers]) => headers["Last-Event-ID"]), ["r-1:1", "r-1:1", "r-1:1", "r-1:2"]);
  });
}

test("a server that does not know the stream goes on from what has arrived", async () => {
  const rest = 'id: r-2:3\nevent: token\ndata: {"index": 0, "text": " a"}\n\n' + DONE.replace("r-1:9", "r-2:4");
  const { requests, error, text } = await run([
    new Response(body(START + token(1, " upon") + token(2, "\u{1f98a}"), true)),
    new Response("{}", { status: 404 }),
    new Response(body(rest)),
  ]);
  assert.equal(error, null);
  assert.equal(text, " upon\u{1f98a} a");
  assert.deepEqual(requests.map(([method, path]) => [method, path]), [
    ["POST", "complete"],
    ["GET", "complete/r-1/events"],
    ["POST", "complete"],
  ]);
  const [first, again] = [requests[0][3], requests[2][3]];
  assert.ok(again.startsWith(first.slice(0, -1)), "the first body, with resume");
  assert.ok(again.includes('"receipt":{"seed": 9007199254740993}'), "with every digit of the seed");
  assert.deepEqual(JSON.parse(again).resume.choices, [{ text: " upon\u{1f98a}" }]);
  assert.equal(JSON.parse(again).resume.after, 2);
});

test("a stream is lost when the server no longer has it or does not respond", async () => {
  const missing = await run([new Response(body(START, true)), new Response("{}", { status: 404 })]);
  assert.ok(missing.error instanceof CompletionError);
  assert.match(missing.error.message, /connection was lost/);
  const silent = await run([new Response(body(START, true)), ...Array(20).fill(new TypeError("Failed to fetch"))]);
  assert.match(silent.error.message, /connection was lost/);
  assert.ok(silent.requests.length < 12, "retries are limited");
  const nothing = await run([new Response(body("", true))]);
  assert.match(nothing.error.message, /connection was lost/);
});

test("an error event ends the stream without a retry", async () => {
  const { error, requests } = await run([new Response(body(START + 'event: error\ndata: {"error": {"message": "It broke."}}\n\n'))]);
  assert.equal(error.message, "It broke.");
  assert.equal(requests.length, 1);
});

test("a busy server gets a limited number of retries after countdowns", async () => {
  const { events, error } = await run([busy(2), busy(1), new Response(body(START + DONE))]);
  assert.equal(error, null);
  const waits = events.filter(({ type }) => type === "wait").map(({ data }) => data);
  assert.deepEqual(waits.map(({ seconds }) => seconds), [2, 1, 1]);
  assert.equal(waits[0].message, "The queue is full");
  const never = await run(Array.from({ length: 20 }, () => busy(1)));
  assert.equal(never.error.message, "The queue is full");
  assert.equal(never.requests.length, 6);
});

test("an error without Retry-After is final, and a response other than JSON is reported by its status", async () => {
  const refused = { error: { message: "Too long", code: "context_length_exceeded", max_model_len: 512 } };
  const { error } = await run([new Response(JSON.stringify(refused), { status: 400 })]);
  assert.deepEqual([error.message, error.status, error.detail.max_model_len], ["Too long", 400, 512]);
  const html = await run([new Response("<p>No", { status: 502, statusText: "Bad Gateway" })]);
  assert.equal(html.error.message, "The server answered 502 Bad Gateway.");
  const away = await run([new TypeError("Failed to fetch")]);
  assert.match(away.error.message, /cannot be reached/);
});

test("stopping cancels the request at the server, which would otherwise wait for the client to reconnect", async () => {
  const stop = new AbortController();
  const responses = [new Response(body(START + token(1, " upon"), true))];
  mock.method(globalThis, "fetch", async (path, options) => {
    requests.push([options.method ?? "GET", path]);
    if (options.method !== "POST" && options.signal?.aborted) throw options.signal.reason;
    return responses.shift() ?? new Response("{}");
  });
  const requests = [];
  await assert.rejects(async () => {
    for await (const { type } of complete("Once", {}, stop.signal)) if (type === "lost") stop.abort();
  }, { name: "AbortError" });
  mock.restoreAll();
  assert.deepEqual(requests, [["POST", "complete"], ["DELETE", "complete/r-1"]]);
});
