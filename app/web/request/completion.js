// Client of the service: complete() sends POST /complete and yields its events, ask() sends any other request and
// returns its JSON. Retries after Retry-After, and resumes a stream whose connection broke. The API key is kept for this tab
// only (in memory if there is no storage), sent as Authorization, and never part of a URL.

import { parseExact, requestBody } from "./body.js";
import { SseParser } from "./sse.js";

const PATIENCE = 5; // how often a request that was refused with Retry-After is sent again
const RESUME_SECONDS = [0.25, 0.5, 1, 2, 4, 8, 8, 8]; // pauses before the attempts to go on with a broken stream
const UNREACHABLE = "The server cannot be reached. Is it running, and are you online?";
const LOST = "The connection was lost before the end. The text so far is kept.";
const KEY = "inkstream.key"; // of the session storage
let key = stored();

/** Anything that ended a request other than `done` or the user. The message is meant for the user's eyes. */
export class CompletionError extends Error {
  constructor(message, { status = null, retryAfter = null, detail = {} } = {}) {
    super(message);
    this.status = status; // of the answer, where there was one
    this.retryAfter = retryAfter; // seconds, or null where the server did not say
    this.detail = detail; // the server's error object
  }
}

/**
 * Yields { type, data }: start, queue and token as the server sends them, wait { seconds, message } once a second
 * while it is too busy, lost { seconds } where the connection broke and is sought again, and done as the last.
 * Everything else throws: an `error` event, a refusal, a lost connection (CompletionError), or the caller's own
 * abort (AbortError).
 *
 * `typed` maps a request field to what the user typed into it. An empty one is left out: the model's default.
 * `parameters` (schema.js) tell of which kind each is. `origin`: of another service, which gets no key; "" for this one.
 */
export async function* complete(prompt, typed, signal, parameters = [], origin = "") {
  const body = requestBody(prompt, typed, parameters);
  for (let attempt = 1; ; attempt++) {
    try {
      return yield* stream(await post(at(origin, "complete"), body, signal, "text/event-stream"), signal, origin);
    } catch (error) {
      if (!error.retryAfter || attempt > PATIENCE) throw error;
      yield* countdown(error, signal);
    }
  }
}

/** The JSON that the server answers: to `body` by POST, without one by GET. Throws CompletionError or AbortError. */
export async function ask(path, body = null, signal = null) {
  const response = body === null ? await get(path, signal) : await post(path, JSON.stringify(body), signal);
  return reach(response.json(), LOST);
}

/** { id, weights_version, ... } of the model that is being served, here or at another service's origin. */
export async function model(origin = "") {
  return (await ask(at(origin, "v1/models"))).data[0];
}

function at(origin, path) {
  return origin ? `${origin}/${path}` : path;
}

// The key is that of this service, and no other one's.
function keyFor(url) {
  return isElsewhere(url) ? {} : authorization();
}

function isElsewhere(url) {
  return /^\s*(https?:)?\/\//i.test(url);
}

function post(url, body, signal, accept = "application/json") {
  const headers = { "Content-Type": "application/json", Accept: accept, ...keyFor(url) };
  return answer(url, { method: "POST", headers, body, cache: "no-store", signal });
}

function get(url, signal, headers = {}) {
  return answer(url, { headers: { ...headers, ...keyFor(url) }, cache: "no-store", signal });
}

// A browser does not tell a page whether a service of another origin is down or refuses the page.
async function answer(url, request) {
  const elsewhere = () => `${new URL(url).origin} cannot be reached. Is it running, with --allow-origin ${location.origin}?`;
  const response = await reach(fetch(url, request), isElsewhere(url) ? elsewhere() : UNREACHABLE);
  if (!response.ok) throw await refusal(response);
  return response;
}

// One stream, over as many connections as it takes.
async function* stream(response, signal, origin) {
  const last = { id: "" };
  signal?.addEventListener("abort", () => cancel(origin, last.id), { once: true });
  for (let lost = 0; ; ) {
    try {
      for await (const event of events(response, last)) {
        lost = 0; // it goes on: the next break is a new one
        yield event;
        if (event.type === "done") return;
      }
    } catch (error) {
      if (!error.broken || !last.id) throw error;
    }
    for (response = null; !response; lost++) {
      const seconds = RESUME_SECONDS[lost];
      if (seconds === undefined || !last.id) throw new CompletionError(LOST);
      yield { type: "lost", data: { seconds } };
      await pause(seconds, signal);
      response = await resumed(origin, last.id, signal);
    }
  }
}

// A disconnected client might reconnect: only this tells the server to cancel the completion.
function cancel(origin, id) {
  if (!id) return;
  const url = streamAt(origin, id);
  fetch(url, { method: "DELETE", headers: keyFor(url), keepalive: true }).catch(() => {});
}

function streamAt(origin, id) {
  return at(origin, `complete/${encodeURIComponent(id.replace(/:\d+$/, ""))}`);
}

// null where the server cannot be reached yet; where it knows nothing of the stream any more, there is no hope.
async function resumed(origin, id, signal) {
  try {
    return await get(`${streamAt(origin, id)}/events`, signal, { Accept: "text/event-stream", "Last-Event-ID": id });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.status === null || error.status >= 502) return null;
    throw new CompletionError(LOST, { status: error.status });
  }
}

async function* events(response, last) {
  const reader = response.body.getReader();
  const parser = new SseParser();
  let ended = false;
  try {
    for (;;) {
      const { done, value } = await connected(reader.read());
      if (done) return;
      for (const event of parser.feed(value)) {
        const data = event.type === "token" ? JSON.parse(event.data) : parseExact(event.data); // seeds have 64 bits
        if (event.type === "error") throw new CompletionError(data.error?.message ?? data.message ?? LOST);
        ended = event.type === "done";
        last.id = event.id;
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

async function connected(promise) {
  try {
    return await promise;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw Object.assign(new CompletionError(LOST), { broken: true });
  }
}

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
  const retryAfter = secondsOf(response.headers.get("Retry-After"));
  return new CompletionError(message, { status: response.status, retryAfter, detail: body?.error ?? {} });
}

async function* countdown({ retryAfter, message }, signal) {
  for (let seconds = retryAfter; seconds > 0; seconds--) {
    yield { type: "wait", data: { seconds, message } };
    await pause(1, signal);
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    const aborted = () => (clearTimeout(timer), reject(signal.reason));
    if (signal?.aborted) aborted();
    signal?.addEventListener("abort", aborted, { once: true });
  });
}

// Retry-After is a number of seconds or, from some proxies, a date.
function secondsOf(header) {
  if (header === null) return null;
  if (/^\d+$/.test(header)) return Number(header);
  const until = Math.ceil((Date.parse(header) - Date.now()) / 1000);
  return Number.isFinite(until) ? Math.max(until, 0) : null;
}

/**
 * Several runs of one prompt as one: their events with the index of the run that each is of.
 *
 * `streams`: what complete() gives, one for each run. Yields the first run's start, each run's tokens with `index`, and a
 * `done` that has the choices and receipts of all. A run that fails ends alone: the message is its finish reason. Throws
 * the error of the first one if all fail, and whatever is not a CompletionError.
 */
export async function* concurrently(streams) {
  const iterators = streams.map((stream) => stream[Symbol.asyncIterator]());
  const waiting = new Map(iterators.map((iterator, index) => [index, next(iterator, index)]));
  const [choices, receipts, errors] = [[], [], []];
  let hasStarted = false;
  let tokens = 0;
  try {
    while (waiting.size) {
      const { index, done, value, error } = await Promise.race(waiting.values());
      if (error && !(error instanceof CompletionError)) throw error;
      if (error) [errors[index], choices[index]] = [error, { index, finish_reason: `failed: ${error.message}` }];
      if (done || error) waiting.delete(index);
      else waiting.set(index, next(iterators[index], index));
      if (!value) continue;
      const { type, data } = value;
      if (type === "token") yield { type, data: { ...data, index } };
      else if (type === "done") {
        choices[index] = { ...data.choices[0], index };
        receipts[index] = data.receipt;
        tokens += data.usage?.completion_tokens ?? 0;
      } else if (type !== "start" || !hasStarted) yield value;
      hasStarted ||= type === "start";
    }
  } finally {
    for (const iterator of iterators) iterator.return();
  }
  if (errors.filter(Boolean).length === streams.length) throw errors[0];
  yield { type: "done", data: { choices, receipts, ...(tokens ? { usage: { completion_tokens: tokens } } : {}) } };
}

async function next(iterator, index) {
  try {
    return { index, ...(await iterator.next()) };
  } catch (error) {
    return { index, error };
  }
}

export function tokenize(prompt, signal) {
  return ask("tokenize", { prompt }, signal);
}

export function score(ids, logprobs, signal) {
  return ask("score", { prompt: ids, logprobs }, signal);
}

/** The most likely next token, with all alternatives that the server tells; null where it generates none. */
export async function nextToken(prompt, signal, { source, truncate_prompt_tokens: most }) {
  const fields = { ...(source && { source }), ...(most && { truncate_prompt_tokens: Number(most) }) };
  const body = { prompt, max_tokens: 1, logprobs: 20, stream: false, temperature: 0, ...fields };
  return (await ask("complete", body, signal)).choices[0].tokens[0] ?? null;
}

/** What a request needs beside its own headers. */
export function authorization() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Keeps what the user typed; false for what can be no key. */
export function useKey(typed) {
  const text = typed.trim();
  if (!/^[\x21-\x7e]+$/.test(text)) return false;
  key = text;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Switched off: the key lasts as long as the page.
  }
  return true;
}

function stored() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return "";
  }
}
