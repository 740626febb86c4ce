// The text, one element for each token and one row for each paragraph, so that a token that comes makes the browser
// lay out one paragraph and not the text (and of a long one its end). What streams in is written once a frame,
// and no more than the frame has time for.

import { element } from "../elements.js";
import { tint } from "./scale.js";
import { single } from "./units.js";

const MOST = 200; // tokens in a row
const FOLD = "fold"; // the class of a row that goes on with a paragraph
const NEAR = 24; // px: so close to the bottom counts as being there
const BUDGET = 1; // ms of a frame for making elements; laying them out and painting them takes three times that

export class Rows {
  #root;
  #scroller;
  #row = null;
  #units = new WeakMap(); // of an element
  #queue = [];
  #frame = 0;
  #width = 0;

  /** What the marks stand for: one of MEASURES (scale.js). */
  measure = "probability";

  constructor(root, scroller) {
    [this.#root, this.#scroller] = [root, scroller];
    new ResizeObserver(() => this.#resized()).observe(root);
  }

  /** The whole text; `written`: [[start, end]] of what the model wrote. What no unit tells of has no mark. */
  show(text, units, written) {
    this.#forget();
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

  /** A unit that came, and its text. */
  append(unit, text) {
    for (const one of single([unit], text, unit.start)) {
      this.#queue.push([one, text.slice(one.start - unit.start, one.end - unit.start)]);
    }
    this.#frame ||= requestAnimationFrame(() => this.#write());
  }

  /** The unit of an element, or undefined where it is none of a token. */
  unit(token) {
    return this.#units.get(token);
  }

  /** The first (-1) or the last (1) token, or null. */
  end(step) {
    const tokens = this.#tokens;
    return tokens[step > 0 ? tokens.length - 1 : 0] ?? null;
  }

  /** The token in which this place of the text is, or null. */
  at(offset) {
    return [...this.#tokens].find((token) => this.unit(token).end > offset) ?? null;
  }

  /** The first token that is in sight, or null. */
  inSight() {
    const { top } = this.#scroller.getBoundingClientRect();
    return [...this.#tokens].find((token) => token.getBoundingClientRect().top >= top) ?? null;
  }

  /** The element before (-1) or behind (1) this one, whatever it is of; null at the ends. */
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

  // The view follows the text only for a reader who is at its end; who scrolled up to read stays there.
  #write() {
    const { scrollTop, scrollHeight, clientHeight } = this.#scroller;
    const following = scrollHeight - scrollTop - clientHeight < NEAR;
    const until = performance.now() + BUDGET;
    if (this.#row) this.#row = fold(this.#row, (token, at) => this.#split(token, at));
    let written = 0;
    while (written < this.#queue.length && performance.now() < until) this.#put(...this.#queue[written++]);
    this.#queue.splice(0, written);
    if (following) this.#scroller.scrollTop = this.#scroller.scrollHeight;
    this.#frame = this.#queue.length ? requestAnimationFrame(() => this.#write()) : 0;
  }

  // Text of which no token is known, in the ink of each of its parts.
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

  // An element in two, which are of the same unit; returns the second.
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

// Moves the last line of a row that has grown long into a row of its own; returns the row to go on with. A browser lays out
// a paragraph as a whole, and 2,000 tokens of one take it 10 ms. Where a line ends anyway, the next one may as well begin a
// row of its own. It does not look different, until the width changes: then unfold(). `split(token, at)` cuts an element in
// two.
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

// Paragraphs in one row each, as they were.
function unfold(root) {
  for (const row of root.querySelectorAll(`.${FOLD}`)) {
    row.previousElementSibling.append(...row.childNodes);
    row.remove();
  }
}

// The element that begins the last line. A line is cut behind a blank, and most tokens begin with one: then the word
// stands on the new line, and its blank on the old one.
function lastLine(row, split) {
  let below = top(row.lastChild, row.lastChild.textContent.length - 1);
  for (let token = row.lastChild; token.previousSibling; token = token.previousSibling) {
    const word = token.textContent.search(/\S/);
    if (word > 0 && top(token, word) === below && top(token, 0) < below) return split(token, word);
    const before = token.previousSibling;
    if (top(token, 0) === below && top(before, before.textContent.length - 1) < below) return token;
    if (top(token, 0) < below) below = top(token, 0); // a word that is longer than a line: try the line above
  }
  return null;
}

// Of the line in which a character stands.
function top(token, at) {
  const range = document.createRange();
  range.setStart(token.firstChild, at);
  range.setEnd(token.firstChild, at + 1);
  return range.getBoundingClientRect().top;
}
