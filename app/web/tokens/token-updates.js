// Keeps everything about tokens up to date with the document: the inspect view, for which it has text scored, and the
// bars of the next token.

import { difference } from "../text/manuscript.js";
import { NextTokenBars, NextToken } from "./next-token-bars.js";
import { Inspect } from "./inspect.js";
import { MarkLegend } from "./mark-legend.js";
import { fill, gaps, isMeasured, within } from "./token-units.js";

export class TokenUpdates {
  #elements;
  #server;
  #inspect;
  #bars;
  #note;
  #arrivals = new WeakMap(); // streamed token -> ms since the previous one
  #latest = 0; // arrival of the latest token, 0 before the first of a run
  #isRunning = false;
  #next;
  #onerror;
  #document = { text: "", units: [], written: [], running: false };
  #known = { text: "", units: [] }; // what the view shows, including scored tokens
  #measuredText = null; // the text that the server has scored, of a long one as much as the context holds
  #request = null; // the AbortController of the scoring request in flight
  #vocabulary = 0;
  #drawn = null; // the text whose next token the bars show

  /**
   * `elements`: inspect (the view), scroller (what it scrolls in), note (the line under it), next (<details>), bars.
   * `server`: tokenize(text, signal), score(ids, logprobs, signal), next(text, signal): see fill() and NextToken.
   * `onpick(at, token)`: the user chose this token for that position; `onerror(error)`: a request failed.
   */
  constructor(elements, server, { onpick, onerror }) {
    [this.#elements, this.#server, this.#onerror] = [elements, server, onerror];
    const onselect = () => this.#drawBars();
    const arrival = (token) => this.#arrivals.get(token);
    this.#inspect = new Inspect(elements.inspect, elements.scroller, { onpick, onselect, arrival });
    this.#note = new MarkLegend(elements.note, { onmeasure: (measure) => this.#measure(measure) });
    const onbar = (token) => this.#isStale || onpick(this.#place, token);
    this.#bars = new NextTokenBars(elements.bars, { onpick: onbar });
    const answered = { onanswer: (token) => this.#answered(token), onerror: (error) => this.#failed(error) };
    this.#next = new NextToken(server.next, answered);
    elements.next.addEventListener("toggle", () => this.#drawBars());
  }

  /** Whether the inspect view is open: then a run should request its tokens' alternatives. */
  get isOpen() {
    return !this.#elements.inspect.hidden;
  }

  /** The model's vocabulary size, once it is known. Repeats requests that failed for lack of a key. */
  set vocabulary(count) {
    this.#vocabulary = count;
    this.show(this.#document);
  }

  open({ withFocus }) {
    [this.#elements.inspect.hidden, this.#elements.note.hidden] = [false, false];
    this.show(this.#document);
    if (withFocus) this.#inspect.focus();
  }

  close() {
    [this.#elements.inspect.hidden, this.#elements.note.hidden] = [true, true];
    this.#request?.abort();
    this.#drawBars();
  }

  /** The document changed, or a run began or ended. `document`: { text, units, written, running }, always current. */
  show(document) {
    this.#document = document;
    if (document.running !== this.#isRunning) this.#latest = 0; // a run began or ended
    this.#isRunning = document.running;
    this.#request?.abort(); // it scores an older text
    if (this.isOpen) this.#read();
    this.#drawBars();
  }

  /** Appends a unit and its text. */
  append(unit, text) {
    if (!this.isOpen) return;
    this.#timed(unit);
    this.#inspect.append(unit, text);
    this.#known.text += text;
    if (unit.tokens) this.#known.units.push(unit);
  }

  /** Sets the settings as typed, and the model's defaults for empty ones. */
  settings(typed, resolved) {
    this.#bars.settings(typed, resolved);
  }

  // The position whose next token the bars show: the selected token's, or the end of the text.
  get #place() {
    return this.isOpen ? this.#inspect.selected.start : this.#document.text.length;
  }

  // Whether the bars still show another text's next token.
  get #isStale() {
    return this.#elements.bars.ariaBusy === "true";
  }

  set #isStale(value) {
    this.#elements.bars.ariaBusy = String(value);
  }

  async #read() {
    const { text, units, running } = this.#document;
    const isWhole = () => this.#measuredText === text || !gaps(this.#known.units, text.length).length;
    if (this.#known.text === text && isWhole()) return this.#describe();
    const all = [...units.filter(isMeasured), ...this.#measured(text, units)].sort((a, b) => a.start - b.start);
    this.#show(text, all, 0);
    if (running || !gaps(all, text.length).length) return;
    const { signal } = (this.#request = new AbortController());
    try {
      const { units: filled, unread } = await fill(text, all, { ...this.#server, signal });
      if (signal.aborted) return;
      this.#show(text, filled, unread);
      this.#measuredText = text;
    } catch (error) {
      if (!signal.aborted) this.#refused(error);
    }
  }

  // Earlier measurements stay valid as long as nothing before them has changed. The last token is uncertain unless the
  // model itself continued after it, because one more letter may change it.
  #measured(text, units) {
    const { start } = difference(this.#known.text, text);
    const ends = new Set(units.map((unit) => unit.start));
    const holds = this.#known.units.filter(({ end }) => end < start || (end === start && ends.has(end)));
    return gaps(units, text.length).flatMap((hole) => within(holds, hole));
  }

  #show(text, units, unread) {
    this.#known = { text, units: [...units] };
    this.#inspect.show(text, units, this.#document.written);
    this.#describe();
    this.#note.say(unread ? `The first ${unread.toLocaleString("en")} tokens are beyond what the model reads.` : "");
    this.#drawBars();
  }

  #describe() {
    const { text, units } = this.#known;
    this.#note.show(text, units, this.#document.written, (token) => this.#arrivals.get(token));
  }

  #measure(measure) {
    this.#inspect.measure = measure;
    this.#inspect.show(this.#known.text, this.#known.units, this.#document.written);
  }

  // The first token of a run has no arrival: its latency is the time to first token, which the status line shows.
  #timed({ tokens }) {
    const now = performance.now();
    for (const token of tokens ?? []) {
      if (this.#latest) this.#arrivals.set(token, now - this.#latest);
      this.#latest = now;
    }
  }

  #refused(error) {
    this.#note.say(`Not measured: ${error.message}`);
    this.#onerror(error);
  }

  #drawBars() {
    const { next } = this.#elements;
    const { text, running } = this.#document;
    const wanted = next.open && !running;
    if (wanted && !this.isOpen) {
      this.#isStale = text !== this.#drawn;
      return this.#next.want(text);
    }
    this.#next.stop();
    [this.#isStale, this.#drawn] = [!wanted, null];
    if (wanted) this.#drawSelected();
  }

  #drawSelected() {
    const [token] = this.#inspect.selected?.tokens ?? [];
    if (token?.top?.length) this.#bars.show(token.top, { vocabulary: this.#vocabulary, chosen: token.id });
    else this.#bars.say(token ? "This place has no alternatives." : "Select a token to see its place.");
  }

  #answered(token) {
    [this.#isStale, this.#drawn] = [false, this.#document.text];
    if (token) this.#bars.show(token.top, { vocabulary: this.#vocabulary });
    else this.#bars.say("The text fills the context: no token can follow.");
  }

  #failed(error) {
    this.#bars.say(error.message);
    this.#onerror(error);
  }
}
