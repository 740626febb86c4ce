// The inspect view: the text as the sheet shows it, each token marked by how likely it was, to be walked by keys like
// buttons of which one has the focus. Enter opens the alternatives of a token.

import { element, put } from "../elements.js";
import { Popover } from "./popover.js";
import { Rows } from "./rows.js";
import { Selection } from "./selection.js";

const HELP = "Tokens. Arrow keys go from one to the next, Enter shows what could have stood there.";

export class Inspect {
  #page = element("div");
  #rows;
  #selection;
  #popover;
  #onselect;
  #column = null; // where the walk from line to line began

  /** `onpick(at, token)`: the alternative taken in that place; `onselect(unit)`: a token was selected; `arrival(token)`: ms after the one before. */
  constructor(root, scroller, { onpick, onselect, arrival }) {
    this.#onselect = onselect;
    this.#page.className = "page tokens";
    this.#page.tabIndex = 0;
    this.#page.setAttribute("role", "group");
    this.#page.setAttribute("aria-label", HELP);
    put(root, this.#page);
    this.#rows = new Rows(this.#page, scroller);
    this.#selection = new Selection(this.#rows);
    this.#popover = new Popover(root, {
      onpick: (token) => onpick(this.selected.start, token),
      arrival,
    });
    this.#page.addEventListener("keydown", (event) => this.#pressed(event));
    this.#page.addEventListener("click", (event) => this.#clicked(event));
    this.#page.addEventListener("focus", () => this.#go(this.#rows.inSight() ?? this.#rows.end(1)));
  }

  /** The unit that is selected, or null. */
  get selected() {
    return this.#selection.unit;
  }

  /** What the marks stand for: one of MEASURES (scale.js), from the next show() on. */
  set measure(value) {
    this.#rows.measure = value;
  }

  /** The whole text; `written`: [[start, end]] of what the model wrote. What was selected stays so, where there still is a token. */
  show(text, units, written) {
    const before = this.selected;
    const hadFocus = this.#page.contains(document.activeElement);
    this.#selection.forget();
    this.#page.tabIndex = 0;
    this.#rows.show(text, units, written);
    if (!before && !hadFocus) return;
    const token = before ? this.#rows.at(before.start) : this.#rows.inSight(); // who came before the tokens has the first one
    this.#select(token ?? this.#rows.end(1));
    if (before && this.selected?.tokens[0] === before.tokens[0]) this.#popover.move(this.#selection.token);
    else this.#popover.close();
    if (hadFocus) this.focus();
  }

  /** A unit that came at the end, and its text. */
  append(unit, text) {
    this.#rows.append(unit, text);
  }

  focus() {
    (this.#selection.token ?? this.#page).focus({ preventScroll: true });
  }

  #clicked({ target }) {
    const token = target.closest(".token");
    if (!token || !this.#rows.unit(token) || !getSelection().isCollapsed) return;
    this.#go(token);
    this.#open();
  }

  #pressed(event) {
    const isFar = event.ctrlKey || event.metaKey;
    if (!this.selected || event.altKey) return;
    if (event.key === "Enter" || event.key === " ") {
      if (isFar) return; // the page's own
      event.preventDefault();
      return this.#open();
    }
    const isVertical = event.key === "ArrowUp" || event.key === "ArrowDown";
    const column = (isVertical && this.#column) || middle(this.#selection.token);
    const token = this.#target(event.key, isFar, column);
    if (token === undefined) return;
    event.preventDefault();
    if (token) this.#go(token);
    this.#column = isVertical ? column : null;
  }

  // undefined: not a key of ours; null: there is none.
  #target(key, isFar, column) {
    const from = this.#selection.token;
    const beside = (token, step) => this.#selection.beside(token, step);
    if (key === "ArrowRight") return beside(from, 1);
    if (key === "ArrowLeft") return beside(from, -1);
    if (key === "ArrowDown") return nextLine(from, 1, column, beside);
    if (key === "ArrowUp") return nextLine(from, -1, column, beside);
    if (key !== "Home" && key !== "End") return undefined;
    const step = key === "End" ? 1 : -1;
    return isFar ? this.#rows.end(step) : lineEnd(from, step, beside);
  }

  #open() {
    this.#popover.open(this.selected, this.#selection.text, this.#selection.token);
  }

  #go(token) {
    this.#select(token);
    this.#selection.token?.focus();
  }

  #select(token) {
    this.#selection.set(token);
    if (!this.selected) return;
    this.#page.tabIndex = -1;
    this.#onselect(this.selected);
  }
}

// Positions of tokens in lines as laid out by the browser. `beside(element, step)` returns the previous (-1) or next (1)
// token, or null.

// The element in the line above (-1) or below (1) that is nearest to `x`, or null where there is no such line.
function nextLine(token, step, x, beside) {
  const from = topOf(token);
  let line = null;
  let best = null;
  for (let one = beside(token, step); one; one = beside(one, step)) {
    const top = topOf(one);
    if (isSame(top, from)) continue;
    line ??= top;
    if (!isSame(top, line)) break;
    if (best === null || distance(one, x) < distance(best, x)) best = one;
  }
  return best;
}

// The first (-1) or last (1) element of the line.
function lineEnd(token, step, beside) {
  const from = topOf(token);
  let last = token;
  for (let one = beside(token, step); one && isSame(topOf(one), from); one = beside(one, step)) last = one;
  return last;
}

// Where a token stands from left to right.
function middle(token) {
  const { left, right } = first(token);
  return (left + right) / 2;
}

// Of the line in which most of it stands: a word that begins a line has its blank at the end of the line before.
function first(token) {
  const rects = [...token.getClientRects()];
  return rects.reduce((widest, rect) => (rect.width > widest.width ? rect : widest), rects[0] ?? new DOMRect());
}

function topOf(token) {
  return first(token).top;
}

function distance(token, x) {
  const { left, right } = first(token);
  return Math.max(left - x, x - right, 0);
}

function isSame(top, other) {
  return Math.abs(top - other) < 2; // px: lines are further apart
}
