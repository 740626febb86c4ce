// Client of the service: complete() sends POST /complete and yields its events, ask() sends any other request and
// returns its JSON. Retries after Retry-After, and resumes a stream whose connection broke, at another service behind the
// same address if the one that began it is gone. The API key is kept for this tab
// only (in memory if there is no storage), sent as Authorization, and never part of a URL.

import { parseExact, requestBody } from "./request-body.js";
import { SseParser } from "./sse.js";

const PATIENCE = 5; // retries of a request that was refused with Retry-After
const RESUME_SECONDS = [0.25, 0.5, 1, 2, 4, 8, 8, 8]; // pauses before attempts to resume a broken stream
const UNREACHABLE = "The server cannot be reached. Is it running, and are you online?";
const LOST = "The connection was lost before the end. The text so far is kept.";
const KEY = "inkstream.key"; // in the session storage
let key = stored();

/** A request failed. The message is for the user. */
export class CompletionError extends Error {
  constructor(message, { status = null, retryAfter = null, detail = {} } = {}) {
    super(message);
    this.status = status; // HTTP status, or null without a response
    this.retryAfter = retryAfter; // seconds, or null
    this.detail = detail; // the server's error object
  }
}

/**
 * Yields { type, data }: start, queue, token and finally done as the server sends them; wait { seconds, message } once a
 * second while the server is busy; and lost { seconds } when the connection broke and will be resumed. Throws
 * CompletionError for an `error` event, a refusal or a lost connection, and AbortError after an abort.
 *
 * `typed` maps a request field to what the user typed into it; empty ones take the server's defaults. `parameters`
 * (request-parameters.js) have their kinds. `origin`: another service's, which gets no key; "" for this one.
 */
export async function* complete(prompt, typed, signal, parameters = [], origin = "") {
  const body = requestBody(prompt, typed, parameters);
  for (let attempt = 1; ; attempt++) {
    try {
      return yield* stream(await send(body, signal, origin), body, signal, origin);
    } catch (error) {
      if (!error.retryAfter || attempt > PATIENCE) throw error;
      yield* countdown(error, signal);
    }
  }
}

/** The JSON response to a POST of `body`, or to a GET without one. Throws CompletionError or AbortError. */
export async function ask(path, body = null, signal = null) {
  const response = body === null ? await get(path, signal) : await post(path, JSON.stringify(body), signal);
  return reach(response.json(), LOST);
}

/** { id, weights_version, ... } of the model that this service, or the one at `origin`, serves. */
export async function model(origin = "") {
  return (await ask(at(origin, "v1/models"))).data[0];
}

function send(body, signal, origin) {
  return post(at(origin, "complete"), body, signal, "text/event-stream");
}

function at(origin, path) {
  return origin ? `${origin}/${path}` : path;
}

// Only this service gets the key.
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

// Browsers do not reveal whether a service of another origin is down or refuses this page.
async function answer(url, request) {
  const elsewhere = () => `${new URL(url).origin} cannot be reached. Is it running, with --allow-origin ${location.origin}?`;
  const response = await reach(fetch(url, request), isElsewhere(url) ? elsewhere() : UNREACHABLE);
  if (!response.ok) throw await refusal(response);
  return response;
}

// The events of one stream, across reconnections.
async function* stream(response, body, signal, origin) {
  const last = { id: "", start: "", choices: [] };
  signal?.addEventListener("abort", () => cancel(origin, last.id), { once: true });
  for (let lost = 0; ; ) {
    try {
      for await (const event of events(response, last)) {
        lost = 0; // resumed: the next break starts with the shortest pause
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
      response = await resumed(origin, body, last, signal);
    }
  }
}

// Closing the connection does not cancel a completion, since a client may reconnect: a DELETE does.
function cancel(origin, id) {
  if (!id) return;
  const url = streamAt(origin, id);
  fetch(url, { method: "DELETE", headers: keyFor(url), keepalive: true }).catch(() => {});
}

function streamAt(origin, id) {
  return at(origin, `complete/${encodeURIComponent(id.replace(/:\d+$/, ""))}`);
}

// The resumed response; null if the server cannot be reached yet. A server that does not know the stream goes on from what
// has arrived; throws if it cannot.
async function resumed(origin, body, last, signal) {
  const { id, start } = last;
  try {
    return await get(`${streamAt(origin, id)}/events`, signal, { Accept: "text/event-stream", "Last-Event-ID": id });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.status === null) return null;
    if (!start || (error.status !== 404 && error.status < 502)) throw new CompletionError(LOST, { status: error.status });
  }
  try {
    return await send(resumingBody(body, last), signal, origin);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    if (error.status === null || error.status >= 502) return null;
    throw new CompletionError(LOST, { status: error.status });
  }
}

// The body again, with what has arrived. The receipt is the text of the event `start`, in which the seed has all its digits.
function resumingBody(body, { id, start, choices }) {
  const hasLogprobs = (JSON.parse(body).logprobs ?? null) !== null;
  const received = Array.from(choices, (choice) => ({
    text: choice?.text ?? "",
    ...(hasLogprobs && { logprobs: choice?.logprobs ?? 0 }),
  }));
  const after = /\d+$/.exec(id)[0];
  return `${body.slice(0, -1)},"resume":{"after":${after},"receipt":${start},"choices":${JSON.stringify(received)}}}`;
}

// Adds an event to what has arrived.
function arrived(last, { type, id, data: json }, data) {
  last.id = id;
  if (type === "start") {
    last.start = json;
    last.choices = Array.from({ length: data.settings?.n ?? 1 }, () => ({ text: "", logprobs: 0 }));
  } else if (type === "token") {
    const choice = (last.choices[data.index ?? 0] ??= { text: "", logprobs: 0 });
    choice.text += data.text;
    choice.logprobs += data.tokens?.length ?? 0;
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
        arrived(last, event, data);
        yield { type: event.type, data };
        if (ended) return;
      }
    }
  } finally {
    // An open body would keep the server generating. A broken one needs no cancel, and its error was thrown above. After
    // `done` the server ends the body, and the connection can be reused.
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

// fetch reports a network failure by a TypeError whose text differs between browsers.
async function reach(promise, sentence) {
  try {
    return await promise;
  } catch (error) {
    throw error.name === "AbortError" ? error : new CompletionError(sentence);
  }
}

async function refusal(response) {
  // A proxy answers in HTML; only its status is useful.
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
 * Merges several runs of one prompt into one stream of events, each with the index of its run.
 *
 * `streams`: one of complete() for each run. Yields the first run's start, all tokens with `index`, and one `done` with
 * the choices and receipts of all. If a run fails, its error message becomes its finish reason. Throws the first run's
 * error if all fail, and every error that is not a CompletionError.
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

/** The most likely next token with its alternatives; null if the server generates none. */
export async function nextToken(prompt, signal, { source, truncate_prompt_tokens: most }) {
  const fields = { ...(source && { source }), ...(most && { truncate_prompt_tokens: Number(most) }) };
  const body = { prompt, max_tokens: 1, logprobs: 20, stream: false, temperature: 0, ...fields };
  return (await ask("complete", body, signal)).choices[0].tokens[0] ?? null;
}

/** The Authorization header, or no header. */
export function authorization() {
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** Stores the key that the user typed; false if it cannot be one. */
export function useKey(typed) {
  const text = typed.trim();
  if (!/^[\x21-\x7e]+$/.test(text)) return false;
  key = text;
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    // Storage is disabled: the key lasts as long as the page.
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
