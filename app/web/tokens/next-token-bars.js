// The next token's distribution as bars: the model's probability (outline) and the probability after sampling filters
// (filled). Redrawn whenever a setting changes.

import { element, put } from "../elements.js";
import { Alternative, obstacle, walk } from "./alternative.js";
import { OFF, sampled } from "./sampling.js";
import { percent, probability, restOf } from "./token.js";

// Settings that the bars do not show because their effect depends on the text before; with the values that mean "off".
const OTHERS = {
  repetition_penalty: ["1"],
  presence_penalty: ["0"],
  frequency_penalty: ["0"],
  logit_bias: ["{}"],
  min_tokens: ["0"],
  regex: [],
  json_schema: [],
  grammar: [],
};

const REST = 300; // ms without typing until the next token is requested
const MOST = 10; // bars, besides one for the chosen token and one for all others

export class NextTokenBars {
  #onpick;
  #head = element("p");
  #list = element("ol");
  #rest = element("div");
  #note = element("p");
  #alternatives = [];
  #top = [];
  #vocabulary = 0;
  #typed = {};
  #resolved = {};

  /** `onpick(token)`: the user chose a bar. */
  constructor(root, { onpick }) {
    this.#onpick = onpick;
    this.#list.className = "alternatives";
    this.#rest.className = "alternative rest";
    this.#note.className = "note";
    this.#note.setAttribute("role", "status");
    this.#head.className = "alternative head";
    put(root, this.#head, this.#list, this.#note);
    this.#list.addEventListener("click", (event) => this.#clicked(event));
    this.#list.addEventListener("keydown", (event) => walk(event, this.#alternatives.map((one) => one.element)));
  }

  /** Shows the most likely tokens of a position; `chosen`: the id of the one in the text. */
  show(top, { vocabulary, chosen = null }) {
    const hadFocus = this.#list.contains(document.activeElement);
    [this.#top, this.#vocabulary] = [top, vocabulary];
    const shown = top.filter(({ id }, index) => index < MOST || id === chosen);
    this.#alternatives = shown.map((token) => new Alternative(token, token.id === chosen));
    const items = this.#alternatives.map((one) => element("li", one.element));
    this.#list.replaceChildren(...items, ...(top.length ? [element("li", this.#rest)] : []));
    this.#draw();
    if (hadFocus) this.#alternatives[0]?.element.focus({ preventScroll: true });
  }

  /** Sets the settings as typed, and the model's defaults for empty ones. */
  settings(typed, resolved = {}) {
    [this.#typed, this.#resolved] = [typed, resolved];
    this.#draw();
  }

  /** Shows a sentence instead of bars. */
  say(sentence) {
    this.show([], { vocabulary: 0 });
    this.#head.replaceChildren();
    this.#note.textContent = sentence;
  }

  #draw() {
    if (!this.#top.length) return;
    const { values, doubts } = this.#settings();
    const { shares, rest, exact } = sampled(this.#top, this.#vocabulary, values);
    const left = new Map(this.#top.map((token, index) => [token, shares[index]]));
    const models = this.#alternatives.map((one) => probability(one.token));
    const made = this.#alternatives.map((one) => left.get(one.token));
    for (const one of this.#alternatives) left.delete(one.token);
    const others = this.#others([...left], rest);
    const full = scale(Math.max(...models, ...made, others.model, others.share));
    this.#alternatives.forEach((one, at) => one.show({ model: models[at], left: made[at], full }));
    this.#drawHead(full);
    this.#drawRest(others, full);
    const known = percent(1 - restOf(this.#top));
    const estimate = `Estimated: the ${this.#top.length} most likely hold ${known}, the others are assumed to follow a power law.`;
    this.#note.textContent = [...doubts, ...(exact ? [] : [estimate])].join(" ");
  }

  #drawHead(full) {
    const words = ["", `0 to ${100 * full} %`, "model", "sampled"];
    this.#head.replaceChildren(...words.map((text) => element("span", text)));
  }

  // All tokens without a bar of their own: `known` [[token, share]] of those that the server sent, and `rest`.
  #others(known, rest) {
    return {
      others: Math.max(this.#vocabulary - this.#alternatives.length, 0),
      model: known.reduce((sum, [token]) => sum + probability(token), restOf(this.#top)),
      share: known.reduce((sum, [, left]) => sum + left, rest.share),
      count: known.filter(([, left]) => left > 0).length + rest.count,
    };
  }

  #drawRest({ others, model, share, count }, full) {
    this.#rest.hidden = others === 0;
    const parts = ["label", "track", "share", "share sampled"].map((name) => Object.assign(element("span"), { className: name }));
    parts[0].append(count > 0 && count < others ? `${count} of ${others} others` : `${others} others`);
    for (const [name, width] of [["outline", model], ["fill", share]]) {
      const bar = Object.assign(element("span"), { className: name });
      bar.style.width = `${(100 * width) / full}%`;
      parts[1].append(bar);
    }
    parts[2].append(percent(model));
    parts[3].append(count > 0 ? percent(share) : "out");
    this.#rest.classList.toggle("out", count === 0);
    this.#rest.replaceChildren(...parts);
  }

  // The settings as numbers, and sentences about those that are not drawn.
  #settings() {
    const [values, doubts] = [{}, []];
    for (const name of Object.keys(OFF)) {
      const typed = this.#typed[name]?.trim() ?? "";
      const value = Number(typed === "" ? (this.#resolved[name] ?? OFF[name]) : typed);
      if (Number.isFinite(value)) values[name] = value;
      else doubts.push(`${name} is no number, and not drawn.`);
    }
    const set = Object.keys(OTHERS).filter((name) => this.#isSet(name));
    if (set.length) doubts.push(`Not drawn: ${set.join(", ")}.`);
    return { values, doubts };
  }

  // The model's own default counts as unset.
  #isSet(name) {
    const text = this.#typed[name]?.trim() ?? "";
    const isDefault = text === "" || text === String(this.#resolved[name] ?? "");
    return !isDefault && !OTHERS[name].some((neutral) => text === neutral || Number(text) === Number(neutral));
  }

  #clicked({ target }) {
    const button = target.closest("button");
    const taken = this.#alternatives.find((one) => one.element === button)?.token;
    if (!taken) return;
    if (obstacle(taken)) this.#note.textContent = obstacle(taken);
    else this.#onpick({ ...taken, top: this.#top });
  }
}

// The probability of a full-width bar. It changes in steps, so that a bar visibly grows with its probability.
function scale(largest) {
  return [0.25, 0.5].find((step) => largest <= step) ?? 1;
}

/**
 * Requests the next token of a text that is being typed: once typing pauses, one request at a time, no text twice.
 * `ask(text, signal)` resolves to the server's token, or null at the end of the context; `onanswer(token)` and
 * `onerror(error)` receive the result.
 */
export class NextToken {
  #ask;
  #onanswer;
  #onerror;
  #timer = 0;
  #request = null; // the AbortController of the request in flight
  #wanted = null; // the text of the last or pending request

  constructor(ask, { onanswer, onerror }) {
    [this.#ask, this.#onanswer, this.#onerror] = [ask, onanswer, onerror];
  }

  /** Requests the token after this text, and forgets any other request. */
  want(text) {
    if (text === this.#wanted) return;
    this.stop();
    this.#wanted = text;
    this.#timer = setTimeout(() => this.#send(text), REST);
  }

  /** Cancels the request. */
  stop() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    [this.#request, this.#wanted] = [null, null];
  }

  async #send(text) {
    const request = (this.#request = new AbortController());
    try {
      const token = await this.#ask(text, request.signal);
      if (this.#request === request) this.#onanswer(token);
    } catch (error) {
      if (this.#request !== request) return; // superseded by a newer request
      this.#wanted = null; // the same text may be requested again
      this.#onerror(error);
    }
  }
}
