// The text with one element for each token and one row for each paragraph, so that a new token makes the browser lay
// out one paragraph (the end of it, if it is long) instead of the whole text. Streamed tokens are written once a frame,
// as many as the frame has time for.

import { element } from "../elements.js";
import { Follower } from "../text/follower.js";
import { tint } from "./mark-scale.js";
import { single } from "./token-units.js";

const MOST = 100; // tokens in a row
const FOLD = "fold"; // the class of a row that continues a paragraph
const BUDGET = 1; // ms of a frame for creating elements; layout and paint take three times as long

export class TokenRows {
  #root;
  #scroller;
  #follower;
  #row = null;
  #units = new WeakMap(); // element -> unit
  #queue = [];
  #frame = 0;
  #width = 0;

  /** What the marks show: one of MEASURES (mark-scale.js). */
  measure = "probability";

  constructor(root, scroller) {
    [this.#root, this.#scroller] = [root, scroller];
    this.#follower = new Follower(scroller, root);
    new ResizeObserver(() => this.#resized()).observe(root);
  }

  /** Shows the whole text; `written`: [[start, end]] of what the model wrote. Text without a unit has no mark. */
  show(text, units, written) {
    this.#forget();
    this.#follower.rest();
    this.#root.replaceChildren();
    this.#row = null;
    let at = 0;
    for (const unit of single(units, text)) {
      this.#putPlain(text, at, unit.start, written);
      this.#put(unit, text.slice(unit.start, unit.end), isIn(written, unit.start));
      at = unit.end;
    }
    this.#putPlain(text, at, text.length, written);
  }

  /** Appends a unit and its text. */
  append(unit, text) {
    for (const one of single([unit], text, unit.start)) {
      this.#queue.push([one, text.slice(one.start - unit.start, one.end - unit.start)]);
    }
    this.#frame ||= requestAnimationFrame(() => this.#write());
  }

  /** The unit of an element, or undefined if it shows plain text. */
  unit(token) {
    return this.#units.get(token);
  }

  /** The first (-1) or the last (1) token, or null. */
  end(step) {
    const tokens = this.#tokens;
    return tokens[step > 0 ? tokens.length - 1 : 0] ?? null;
  }

  /** The token at this offset of the text, or null. */
  at(offset) {
    return [...this.#tokens].find((token) => this.unit(token).end > offset) ?? null;
  }

  /** The first visible token, or null. */
  inSight() {
    const { top } = this.#scroller.getBoundingClientRect();
    return [...this.#tokens].find((token) => token.getBoundingClientRect().top >= top) ?? null;
  }

  /** The previous (-1) or next (1) element, token or plain text; null at the ends. */
  beside(token, step) {
    if (step > 0) return token.nextElementSibling ?? token.parentElement.nextElementSibling?.firstElementChild ?? null;
    return token.previousElementSibling ?? token.parentElement.previousElementSibling?.lastElementChild ?? null;
  }

  get #tokens() {
    return this.#root.getElementsByClassName("token");
  }

  #forget() {
    cancelAnimationFrame(this.#frame);
    [this.#queue, this.#frame] = [[], 0];
  }

  #write() {
    const until = performance.now() + BUDGET;
    if (this.#row) this.#row = fold(this.#row, (token, at) => this.#split(token, at));
    let written = 0;
    while (written < this.#queue.length && performance.now() < until) this.#put(...this.#queue[written++]);
    this.#queue.splice(0, written);
    this.#follower.grew();
    this.#frame = this.#queue.length ? requestAnimationFrame(() => this.#write()) : 0;
  }

  // Text without known tokens, each part in the color of its author.
  #putPlain(text, start, end, written) {
    const borders = written.flat().filter((border) => border > start && border < end);
    [start, ...borders].forEach((from, index) => {
      this.#put(null, text.slice(from, borders[index] ?? end), isIn(written, from));
    });
  }

  // What a run brings is the model's.
  #put(unit, text, isWritten = true) {
    for (const line of text.match(/[^\n]*\n|[^\n]+/g) ?? []) {
      this.#row ??= this.#root.appendChild(element("div"));
      this.#row.append(this.#token(unit, line, isWritten));
      if (line.endsWith("\n")) this.#row = null;
    }
  }

  // Only the width moves the ends of lines. The last row is sought anew: it may have gone.
  #resized() {
    if (this.#root.clientWidth === this.#width) return;
    this.#width = this.#root.clientWidth;
    unfold(this.#root);
    if (this.#row) this.#row = this.#root.lastElementChild;
  }

  // Splits an element in two of the same unit; returns the second.
  #split(token, at) {
    const rest = element("span", token.firstChild.splitText(at));
    rest.className = token.className;
    this.#units.set(rest, this.#units.get(token));
    token.after(rest);
    return rest;
  }

  #token(unit, text, isWritten) {
    const token = element("span", text);
    const ink = isWritten ? "written" : "";
    if (!unit?.tokens) {
      token.className = ink;
      return token;
    }
    this.#units.set(token, unit);
    const space = text[0] === " " ? "spaced" : "";
    token.className = ["token", tint(unit.tokens, this.measure), space, ink].filter(Boolean).join(" ");
    return token;
  }
}

function isIn(ranges, offset) {
  return ranges.some(([start, end]) => offset >= start && offset < end);
}

// Moves the last line of a long row into a row of its own, and returns the row to append to. A browser lays out a
// paragraph as a whole, which takes 10 ms for 2,000 tokens. Since the line ended there anyway, nothing looks different
// until the width changes, which calls unfold(). `split(token, at)` splits an element in two.
function fold(row, split) {
  if (row.childElementCount < MOST) return row;
  const first = lastLine(row, split);
  if (!first) return row;
  const next = document.createElement(row.localName);
  next.className = FOLD;
  while (first.nextSibling) next.prepend(row.lastChild);
  next.prepend(first);
  row.after(next);
  return next;
}

// Joins the rows of each paragraph again.
function unfold(root) {
  for (const row of root.querySelectorAll(`.${FOLD}`)) {
    row.previousElementSibling.append(...row.childNodes);
    row.remove();
  }
}

// The element that begins the last line. Lines break after a space, and most tokens begin with one: such a token is
// split, with its space on the old line and its word on the new one.
function lastLine(row, split) {
  let below = top(row.lastChild, row.lastChild.textContent.length - 1);
  for (let token = row.lastChild; token.previousSibling; token = token.previousSibling) {
    const word = token.textContent.search(/\S/);
    if (word > 0 && top(token, word) === below && top(token, 0) < below) return split(token, word);
    const before = token.previousSibling;
    if (top(token, 0) === below && top(before, before.textContent.length - 1) < below) return token;
    if (top(token, 0) < below) below = top(token, 0); // the word is longer than a line: try the line above
  }
  return null;
}

// The top of the line that holds a character, px.
function top(token, at) {
  const range = document.createRange();
  range.setStart(token.firstChild, at);
  range.setEnd(token.firstChild, at + 1);
  return range.getBoundingClientRect().top;
}
