// The server, as the page sees it: complete() is one POST /complete as a sequence of events, model() is what
// GET /v1/models says of the one model. Knows nothing of the page: no element, no text area, no storage.

import { authorization } from "./key.js";
import { SseParser } from "./sse.js";

/** Anything that ended a request other than `done` or the user. The message is meant for the user's eyes. */
export class CompletionError extends Error {
  constructor(message, retryAfter = null, status = null) {
    super(message);
    this.status = status; // of the answer, where there was one
    this.retryAfter = retryAfter; // seconds, or null where the server did not say
  }
}

/**
 * Yields { type, data } for start, queue and token, then done as the last. Everything else throws: an `error`
 * event, a refusal, a lost connection (CompletionError), or the caller's own abort (AbortError).
 *
 * `typed` maps a request field to what the user typed into it. An empty one is left out: the model's default.
 */
export async function* complete(prompt, typed, signal) {
  const response = await reach(
    fetch("complete", {
      method: "POST",
      headers: { "Content-Type": "application/json", Accept: "text/event-stream", ...authorization() },
      body: requestBody(prompt, typed),
      cache: "no-store",
      signal,
    }),
    "The server cannot be reached. Is it running, and are you online?",
  );
  if (!response.ok) throw await refusal(response);
  yield* events(response.body.getReader());
}

/** { id, weights_version, ... } of the model that is being served. */
export async function model() {
  const response = await reach(fetch("v1/models", { headers: authorization(), cache: "no-store" }), "The server cannot be reached.");
  if (!response.ok) throw await refusal(response);
  return (await response.json()).data[0];
}

async function* events(reader) {
  const parser = new SseParser();
  let ended = false;
  try {
    for (;;) {
      const { done, value } = await reach(reader.read(), LOST);
      if (done) throw new CompletionError(LOST);
      for (const event of parser.feed(value)) {
        const data = JSON.parse(event.data);
        if (event.type === "error") throw new CompletionError(data.error?.message ?? data.message ?? LOST);
        if (event.type === "start") data.seed = exactSeed(event.data) ?? data.seed;
        ended = event.type === "done";
        yield { type: event.type, data };
        if (ended) return;
      }
    }
  } finally {
    // Whatever went wrong, an open body would keep the server generating. One that is broken has nothing left to
    // cancel, and its reason was thrown above. After `done` the server closes, and the connection can be used again.
    if (!ended) reader.cancel().catch(() => {});
  }
}

const LOST = "The connection was lost before the end. The text so far is kept.";

// fetch tells "no network" by a TypeError with a text that differs from browser to browser.
async function reach(promise, sentence) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new CompletionError(sentence);
  }
}

async function refusal(response) {
  // A proxy in between answers in HTML: then the status is all that there is to say.
  const body = await response.json().catch(() => null);
  const message = body?.error?.message ?? `The server answered ${response.status} ${response.statusText}`.trim() + ".";
  const wait = seconds(response.headers.get("Retry-After"));
  const told = wait === null ? message : `${message.replace(/\.?$/, ".")} Try again in ${wait} s.`;
  return new CompletionError(told, wait, response.status);
}

// Retry-After is a number of seconds or, from some proxies, a date.
function seconds(header) {
  if (header === null) return null;
  if (/^\d+$/.test(header)) return Number(header);
  const until = Math.ceil((Date.parse(header) - Date.now()) / 1000);
  return Number.isFinite(until) ? Math.max(until, 0) : null;
}

// The body is put together as text because a seed is an int64 and a JavaScript number holds 53 bits of it.
function requestBody(prompt, typed) {
  const parts = [`"prompt":${JSON.stringify(prompt)}`, '"stream":true'];
  for (const [name, text] of Object.entries(typed)) {
    const value = text.trim();
    if (value !== "") parts.push(`${JSON.stringify(name)}:${name === "source" ? JSON.stringify(value) : numeral(value)}`);
  }
  return `{${parts.join(",")}}`;
}

// What is no number goes out as the string it is. There is one judge of values, and it explains itself better.
function numeral(text) {
  if (/^-?(0|[1-9]\d*)$/.test(text)) return text;
  return Number.isFinite(Number(text)) ? String(Number(text)) : JSON.stringify(text);
}

// Sound on text that JSON.parse took: inside a string the second quote would have a backslash before it.
function exactSeed(json) {
  return json.match(/"seed":\s*(-?\d+)/)?.[1];
}
