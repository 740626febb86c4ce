// One alternative for a position: a button with the token and its bar. A token that cannot be chosen says why.

import { element, put } from "../elements.js";
import { isPart, isSilent, percent, spoken, written } from "./token.js";

/** Why a token cannot be chosen; "" if it can. */
export function obstacle(token) {
  return isPart(token) ? "This is only a part of a character: no text can end in it." : "";
}

/** A token with all its characters visible. */
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
  #share = element("span"); // the model's probability
  #sampled = element("span"); // the probability after sampling filters
  #name = element("span"); // all of this in words, for a screen reader
  #outline = element("span");
  #fill = element("span");
  #button = element("button");
  #chosen;

  /** `chosen`: whether this token is the one in the text. */
  constructor(token, chosen = false) {
    [this.#token, this.#chosen] = [token, chosen];
    const track = put(element("span"), this.#outline, this.#fill);
    track.className = "track";
    this.#outline.className = "outline";
    this.#fill.className = "fill";
    [this.#share.className, this.#sampled.className] = ["share", "share sampled"];
    this.#button.type = "button";
    this.#button.className = "alternative";
    if (chosen) this.#button.setAttribute("aria-current", "true");
    if (obstacle(token)) this.#button.setAttribute("aria-disabled", "true");
    this.#name.className = "unseen";
    this.#button.title = isSilent(token) ? "Ends the text here" : obstacle(token);
    const visible = [label(token), track, this.#share, this.#sampled];
    for (const part of visible) part.setAttribute("aria-hidden", "true");
    put(this.#button, this.#name, ...visible);
  }

  get element() {
    return this.#button;
  }

  get token() {
    return this.#token;
  }

  /** `model`: the model's probability; `left`: the one after sampling, or null; `full`: a full-width bar's. */
  show({ model, left = null, full = 1 }) {
    this.#outline.style.width = `${(100 * model) / full}%`;
    this.#fill.style.width = `${(100 * (left ?? model)) / full}%`;
    this.#share.textContent = percent(model);
    this.#sampled.textContent = left === null ? "" : left === 0 ? "out" : percent(left);
    this.#button.classList.toggle("out", left === 0);
    const sampled = left === null ? [] : [left === 0 ? "cut off" : `${percent(left)} after sampling`];
    const words = [spoken(this.#token), percent(model), ...sampled, ...this.#remarks()];
    this.#name.textContent = words.join(", ").replaceAll("\u00a0", " ");
  }

  #remarks() {
    const remarks = isSilent(this.#token) ? ["ends the text here"] : isPart(this.#token) ? ["cannot be taken"] : [];
    return this.#chosen ? ["chosen", ...remarks] : remarks;
  }
}

/** Arrow-key navigation in a list of buttons. */
export function walk(event, buttons) {
  const steps = { ArrowDown: 1, ArrowUp: -1, Home: -Infinity, End: Infinity };
  const step = steps[event.key];
  if (step === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
  const place = buttons.indexOf(event.target.closest("button")) + step;
  buttons[Math.min(Math.max(place, 0), buttons.length - 1)].focus();
  event.preventDefault();
}
