// A token that may be taken in a place: a button with its bar. Beside it one that could not be drawn alone (a part of
// a character) says why.

import { element, put } from "../elements.js";
import { isPart, isSilent, percent, spoken, written } from "./token.js";

/** Why a token cannot be taken; "" where it can. */
export function obstacle(token) {
  return isPart(token) ? "This is only a part of a character: no text can end in it." : "";
}

/** A token written so that everything in it is seen. */
export function label(token) {
  const pieces = written(token).map(([kind, text]) => {
    const piece = element("span", text);
    piece.className = kind;
    return piece;
  });
  const whole = element("span", ...pieces);
  whole.className = "label";
  return whole;
}

export class Alternative {
  #token;
  #said = element("span"); // the model's share, and what sampling makes of it
  #made = element("span");
  #name = element("span"); // all of it in words, for a screen reader
  #outline = element("span");
  #fill = element("span");
  #button = element("button");
  #chosen;

  /** `chosen`: the one that stands in the text. */
  constructor(token, chosen = false) {
    [this.#token, this.#chosen] = [token, chosen];
    const track = put(element("span"), this.#outline, this.#fill);
    track.className = "track";
    this.#outline.className = "outline";
    this.#fill.className = "fill";
    [this.#said.className, this.#made.className] = ["share", "share made"];
    this.#button.type = "button";
    this.#button.className = "alternative";
    if (chosen) this.#button.setAttribute("aria-current", "true");
    if (obstacle(token)) this.#button.setAttribute("aria-disabled", "true");
    this.#name.className = "unseen";
    this.#button.title = isSilent(token) ? "Ends the text here" : obstacle(token);
    const seen = [label(token), track, this.#said, this.#made];
    for (const part of seen) part.setAttribute("aria-hidden", "true");
    put(this.#button, this.#name, ...seen);
  }

  get element() {
    return this.#button;
  }

  get token() {
    return this.#token;
  }

  /** `model`: its share as the model says; `left`: as sampling leaves it, or null; `full`: the share of a whole bar. */
  show({ model, left = null, full = 1 }) {
    this.#outline.style.width = `${(100 * model) / full}%`;
    this.#fill.style.width = `${(100 * (left ?? model)) / full}%`;
    this.#said.textContent = percent(model);
    this.#made.textContent = left === null ? "" : left === 0 ? "out" : percent(left);
    this.#button.classList.toggle("out", left === 0);
    const sampled = left === null ? [] : [left === 0 ? "cut off" : `${percent(left)} after sampling`];
    const said = [spoken(this.#token), percent(model), ...sampled, ...this.#remarks()];
    this.#name.textContent = said.join(", ").replaceAll("\u00a0", " ");
  }

  #remarks() {
    const remarks = isSilent(this.#token) ? ["ends the text here"] : isPart(this.#token) ? ["cannot be taken"] : [];
    return this.#chosen ? ["chosen", ...remarks] : remarks;
  }
}

/** The arrow keys of a list of buttons. */
export function walk(event, buttons) {
  const steps = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  const step = steps[event.key];
  if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = buttons.indexOf(event.target.closest("button")) + step;
  buttons[Math.min(Math.max(place, 0), buttons.length - 1)].focus();
  event.preventDefault();
}
