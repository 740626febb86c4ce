// The selected token, which alone is focusable: shows its whitespace, and gives a screen reader its probability and
// rank. A token may consist of several elements (a line break splits it); the first has the focus.

import { bits, MARKS, percent, probability, rank, spoken, surprise } from "./token.js";

const BLANKS = { before: /^[ \t]+/, after: /\n$/ };

export class Selection {
  #rows;
  #token = null;

  constructor(rows) {
    this.#rows = rows;
  }

  /** The selected token's first element, or null. */
  get token() {
    return this.#token;
  }

  get unit() {
    return this.#token && this.#rows.unit(this.#token);
  }

  get text() {
    return this.#parts(this.#token).map(({ textContent }) => textContent).join("");
  }

  /** Selects a token, or none (null). */
  set(token) {
    if (this.#token) this.#leave();
    this.#token = token && this.#parts(token)[0];
    if (this.#token) this.#enter();
  }

  /** Drops the selection without touching its elements, which no longer exist. */
  forget() {
    this.#token = null;
  }

  /** The first element of the previous (-1) or next (1) token, skipping plain text; null at the ends. */
  beside(token, step) {
    const unit = this.#rows.unit(token);
    let one = token;
    do one = this.#rows.beside(one, step);
    while (one && (!this.#rows.unit(one) || this.#rows.unit(one) === unit));
    return one && this.#parts(one)[0];
  }

  #enter() {
    for (const part of this.#parts(this.#token)) {
      part.classList.add("selected");
      for (const [side, blanks] of Object.entries(BLANKS)) {
        part.dataset[side] = Array.from(part.textContent.match(blanks)?.[0] ?? "", (blank) => MARKS[blank]).join("");
      }
    }
    this.#token.tabIndex = 0;
    this.#token.setAttribute("role", "button");
    this.#token.setAttribute("aria-haspopup", "dialog");
    this.#token.setAttribute("aria-label", said(this.unit.tokens));
  }

  #leave() {
    for (const part of this.#parts(this.#token)) {
      part.classList.remove("selected");
      for (const side of Object.keys(BLANKS)) delete part.dataset[side];
    }
    for (const name of ["tabindex", "role", "aria-haspopup", "aria-label"]) this.#token.removeAttribute(name);
  }

  #parts(token) {
    const unit = this.#rows.unit(token);
    const walk = (step) => {
      const found = [];
      let one = this.#rows.beside(token, step);
      for (; one && this.#rows.unit(one) === unit; one = this.#rows.beside(one, step)) found.push(one);
      return found;
    };
    return [...walk(-1).reverse(), token, ...walk(1)];
  }
}

function said([token, ...others]) {
  const name = others.length ? `the first of ${others.length + 1} in one character` : spoken(token);
  if (token.logprob === null) return `token ${name}, the first, without a probability`;
  const place = rank(token) ? `rank ${rank(token)}` : `rank beyond ${token.top?.length ?? 0}`;
  return `token ${name}, ${percent(probability(token))}, ${place}, ${bits(surprise(token))}`.replaceAll("\u00a0", " ");
}
