// One continuation among several: its text as it streams, how it ended, how sure the model was of it, and the button
// that takes it.

import { classed, element, put } from "../elements.js";
import { Mirror } from "./mirror.js";

/** The line above columns: what they go on from. */
export function lead(...words) {
  const line = classed("p", "tail", ...words);
  line.tabIndex = 0; // it may have to be scrolled
  return line;
}

export class Column {
  #box = classed("div", "abreast-text inks");
  #text = new Mirror(this.#box);
  #written = false;
  #facts = classed("span", "facts");
  #button = classed("button", "take");
  #pending = "";
  #logprob = 0; // the sum over
  #tokens = 0; // so many tokens
  #ended = false;

  /** `number` counts from 1, and is the key that takes it; `name` is a heading, if there is one. */
  constructor(number, ontake, name = "") {
    this.#box.tabIndex = 0; // it may have to be scrolled
    this.#box.setAttribute("role", "group");
    this.#box.setAttribute("aria-label", `Continuation ${number}${name && `, ${name}`}`);
    put(this.#button, "Take this ", element("kbd", String(number)));
    this.#button.type = "button";
    this.#button.setAttribute("aria-label", `Take this ${number}`); // a phone shows no number
    this.#button.setAttribute("aria-keyshortcuts", String(number));
    this.#button.setAttribute("aria-disabled", "true");
    this.#button.addEventListener("click", ontake);
    const foot = classed("div", "abreast-foot", this.#button, this.#facts);
    this.element = classed("div", "abreast-one", classed("p", "abreast-name", name), this.#box, foot);
  }

  get ended() {
    return this.#ended;
  }

  get hasText() {
    return this.#written || this.#pending !== "";
  }

  /** `tokens` as the server told them, or null. Seen after the next write(). */
  append(text, tokens) {
    this.#pending += text;
    const told = (tokens ?? []).filter(({ logprob }) => logprob !== null);
    for (const { logprob } of told) this.#logprob += logprob;
    this.#tokens += told.length;
  }

  write() {
    // A token starts with its space, which would look like an indent at the top of a column.
    if (this.#pending !== "") this.#text.append(this.#written ? this.#pending : this.#pending.replace(/^ +/, ""));
    this.#written ||= this.#pending !== "";
    this.#pending = "";
  }

  /** This text in place of what was written. */
  fit(text) {
    const shown = text.replace(/^ +/, "");
    this.#text.paint(shown, [[0, shown.length]]);
  }

  /** `reason` as the server names it. The mean is the geometric one: the text's probability, shared out. */
  finish(reason) {
    const mean = Math.exp(this.#logprob / this.#tokens).toFixed(2);
    this.#facts.textContent = this.#tokens ? `${reason} \u00b7 mean probability ${mean}` : reason;
    this.#ended = true;
  }

  offer() {
    if (this.hasText) this.#button.setAttribute("aria-disabled", "false");
  }
}
