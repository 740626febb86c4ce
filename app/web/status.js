// The line under the text: what is going on, how fast it goes, which seed it had. Counts and times the tokens
// as this browser sees them. Knows nothing of requests: main.js tells it what happened.

export class Status {
  #line;
  #numbers;
  #seed = null;
  #sent = 0;
  #first = 0; // when the first and the latest token came, ms on the clock of performance.now()
  #latest = 0;
  #count = 0;
  #rate = null; // tokens per second, once the server has measured it
  #frame = 0;

  /** `line` is the live region; `numbers` maps firstToken, rate, count and seed to the element that shows it. */
  constructor(line, numbers) {
    this.#line = line;
    this.#numbers = numbers;
  }

  get seed() {
    return this.#seed;
  }

  // Screen readers speak the line when it changes, so it changes with the state and never with a token.
  show(state, sentence) {
    if (this.#line.dataset.state === state && this.#line.textContent === sentence) return;
    this.#line.dataset.state = state;
    this.#line.textContent = sentence;
  }

  sent() {
    this.#sent = performance.now();
    this.#first = this.#latest = this.#count = 0;
    this.#rate = this.#seed = null;
    this.show("waiting", FIRST);
    this.#paint();
  }

  queued({ position, eta_ms }) {
    const eta = eta_ms > 0 ? `, about ${Math.ceil(eta_ms / 1000)} s` : "";
    this.show("waiting", `Waiting in queue, position ${position}${eta}`);
  }

  started({ seed }) {
    this.#seed = String(seed);
    this.show("waiting", FIRST); // out of the queue
    this.#paint();
  }

  token() {
    this.#latest = performance.now();
    if (this.#count === 0) this.#first = this.#latest;
    this.#count += 1;
    this.show("streaming", "Streaming");
    this.#frame ||= requestAnimationFrame(() => this.#paint());
  }

  done({ choices, usage, timings }) {
    // Better than our own count: a token that ended inside a code point had no event of its own.
    this.#count = usage?.completion_tokens ?? this.#count;
    // And than our own clock, which sees tokens in the bundles that the network delivers.
    this.#rate = timings?.tokens_per_second ?? null;
    this.show("done", `Done (${choices[0].finish_reason})`);
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
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    const { firstToken, rate, count, seed } = this.#numbers;
    firstToken.textContent = this.#first ? `${Math.round(this.#first - this.#sent)} ms` : NONE;
    rate.textContent = rateText(this.#rate ?? this.#ownRate());
    count.textContent = String(this.#count);
    seed.textContent = this.#seed ?? NONE;
  }

  #ownRate() {
    const seconds = (this.#latest - this.#first) / 1000;
    return seconds > 0 ? (this.#count - 1) / seconds : null;
  }
}

const FIRST = "Waiting for the first token";
const NONE = "\u2013"; // en dash

function rateText(rate) {
  return Number.isFinite(rate) ? rate.toFixed(rate < 10 ? 1 : 0) : NONE;
}
