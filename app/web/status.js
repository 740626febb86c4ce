// The line under the text: state, speed, use of the context, and seed of the run.
// Counts and times the tokens as this browser receives them; run-display.js reports the events.

import { copy, REFUSED } from "./request/clipboard.js";
import { shortSeed } from "./request/field.js";

const SHOWN = 1200; // ms for which "copied" replaces the seed
const REST = 100; // ms between two writes of the numbers of a run: digits that change with each frame cannot be read
const FIRST = "Waiting for the first token";
const NONE = "\u2013"; // en dash

export class Status {
  #line;
  #numbers;
  #seed = null;
  #sent = 0;
  #first = 0; // arrival of the first and the latest token, ms of performance.now()
  #latest = 0;
  #count = 0;
  #counts = []; // tokens of each continuation
  #rate = null; // tokens per second, as measured by the server; null until then
  #drafts = ""; // how many drafts of the run were right, as a sentence
  #read = null; // prompt tokens
  #cut = false; // whether the prompt was truncated
  #context = null; // the model's context, tokens
  #timer = 0;
  #remedy;

  /** `line`: the live region; `remedy`: the button next to it; `numbers`: { firstToken, rate, count, context, seed }. */
  constructor(line, remedy, numbers) {
    [this.#line, this.#remedy] = [line, remedy];
    this.#numbers = numbers;
    numbers.seed.addEventListener("click", () => this.#copySeed());
  }

  set context(tokens) {
    this.#context = tokens;
    this.#paint();
  }

  // Screen readers speak the line whenever it changes, so it changes with the state and not with each token.
  show(state, sentence) {
    if (this.#line.dataset.state === state && this.#line.textContent === sentence) return;
    this.#line.dataset.state = state;
    this.#line.textContent = sentence;
    this.#remedy.hidden = true; // it belonged to the previous message
  }

  /** Offers an action next to the line. */
  offer(words, remedy) {
    this.#remedy.textContent = words;
    this.#remedy.onclick = remedy;
    this.#remedy.hidden = false;
  }

  withdraw() {
    this.#remedy.hidden = true;
  }

  sent() {
    this.#sent = performance.now();
    this.#first = this.#latest = this.#count = 0;
    this.#counts = [];
    this.#rate = this.#seed = this.#read = null;
    this.#drafts = "";
    this.show("waiting", FIRST);
    this.#paint();
  }

  queued({ position, eta_ms }) {
    const eta = eta_ms > 0 ? `, about ${Math.ceil(eta_ms / 1000)} s` : "";
    this.show("waiting", `Waiting in queue, position ${position}${eta}`);
  }

  /** The server is busy; the page retries after this many seconds. */
  waits({ seconds, message }) {
    this.show("waiting", `${message.replace(/\.?$/, ".")} Trying again in ${seconds} s.`);
  }

  lost() {
    this.show("waiting", "The connection was lost. Going on where it broke off \u2026");
  }

  started({ seed, prompt_tokens: read, truncated = false }) {
    this.#seed = String(seed);
    this.#cut = truncated;
    this.#read = read ?? null;
    this.show("waiting", FIRST); // no longer queued
    this.#paint();
  }

  /** Counts a token of the continuation with this index. */
  token(index = 0) {
    this.#latest = performance.now();
    if (this.#count === 0) this.#first = this.#latest;
    this.#count += 1;
    this.#counts[index] = (this.#counts[index] ?? 0) + 1;
    this.show("streaming", "Streaming");
    this.#timer ||= setTimeout(() => this.#paint(), this.#count === 1 ? 0 : REST);
  }

  done({ choices, usage, timings }) {
    // The server's count is exact: a token that ended inside a code point had no event of its own.
    this.#count = usage?.completion_tokens ?? this.#count;
    if (choices.length === 1) this.#counts = [this.#count];
    // So is its rate: the network delivers tokens in bundles.
    this.#rate = timings?.tokens_per_second ?? null;
    this.#drafts = draftsText(timings);
    const reasons = [...new Set(choices.map((choice) => choice.finish_reason))].join(", ");
    this.show("done", `Done (${reasons})${this.#cut ? "; the model read the end of the text only" : ""}`);
    this.#paint();
  }

  stopped() {
    this.show("stopped", "Stopped");
    this.#paint();
  }

  failed(message) {
    this.show("error", `Error: ${message}`);
    this.#paint();
  }

  #paint() {
    clearTimeout(this.#timer);
    this.#timer = 0;
    const { firstToken, rate, count, context, seed } = this.#numbers;
    write(firstToken, this.#first ? `${Math.round(this.#first - this.#sent)} ms` : NONE);
    writeNumber(rate, rateText(this.#rate ?? this.#ownRate()));
    writeNumber(count, String(this.#count));
    if (rate.title !== this.#drafts) rate.title = this.#drafts;
    write(context, this.#used === null || this.#context === null ? NONE : `${this.#used} of ${this.#context}`);
    write(seed, shortSeed(this.#seed ?? NONE));
    const title = this.#seed ? `${this.#seed}: click to copy` : "";
    if (seed.title !== title) seed.title = title;
  }

  async #copySeed() {
    if (!this.#seed) return;
    const { seed } = this.#numbers;
    const done = await copy(this.#seed);
    if (!done) return this.show("idle", REFUSED);
    seed.textContent = "copied";
    setTimeout(() => this.#paint(), SHOWN);
  }

  /** Whether prompt and output fill the model's context. */
  get isFull() {
    return this.#context !== null && this.#used >= this.#context;
  }

  // Context tokens used by the longest continuation; each has a context of its own.
  get #used() {
    return this.#read === null ? null : this.#read + Math.max(0, ...this.#counts);
  }

  #ownRate() {
    const seconds = (this.#latest - this.#first) / 1000;
    return seconds > 0 ? (this.#count - 1) / seconds : null;
  }
}

// Keeps the text node, since a new one takes the browser longer to lay out. The numbers change often during a run.
function write(element, text) {
  const { firstChild: node } = element;
  if (!node) element.textContent = text;
  else if (node.data !== text) node.data = text;
}

// All digits are equally wide.
function writeNumber(element, text) {
  const width = text.length > 4 ? `${text.length}ch` : "";
  if (element.style.width !== width) element.style.width = width;
  write(element, text);
}

// Drafts are tokens that the service guesses, to compute several in one step: docs/speculation.md.
function draftsText({ drafted_tokens: drafted = 0, accepted_tokens: accepted = 0 } = {}) {
  return drafted > 0 ? `${accepted} of ${drafted} tokens that were guessed ahead were right` : "";
}

function rateText(rate) {
  return Number.isFinite(rate) ? rate.toFixed(rate < 10 ? 1 : 0) : NONE;
}
