// The inspect view: the text as the sheet shows it, with each token marked by its probability. Arrow keys move between
// tokens (roving focus), and Enter opens the alternatives of a token.

import { element, put } from "../elements.js";
import { Popover } from "./popover.js";
import { TokenRows } from "./token-rows.js";
import { Selection } from "./selection.js";

const HELP = "Tokens. Arrow keys go from one to the next, Enter shows what could have stood there.";

export class Inspect {
  #page = element("div");
  #rows;
  #selection;
  #popover;
  #onselect;
  #column = null; // x position that ArrowUp and ArrowDown keep, px

  /**
   * `onpick(at, token)`: the user chose an alternative for that position; `onselect(unit)`: a token was selected;
   * `arrival(token)`: ms since the previous token.
   */
  constructor(root, scroller, { onpick, onselect, arrival }) {
    this.#onselect = onselect;
    this.#page.className = "page tokens";
    this.#page.tabIndex = 0;
    this.#page.setAttribute("role", "group");
    this.#page.setAttribute("aria-label", HELP);
    put(root, this.#page);
    this.#rows = new TokenRows(this.#page, scroller);
    this.#selection = new Selection(this.#rows);
    this.#popover = new Popover(root, {
      onpick: (token) => onpick(this.selected.start, token),
      arrival,
    });
    this.#page.addEventListener("keydown", (event) => this.#pressed(event));
    this.#page.addEventListener("click", (event) => this.#clicked(event));
    this.#page.addEventListener("focus", () => this.#go(this.#rows.inSight() ?? this.#rows.end(1)));
  }

  /** The selected unit, or null. */
  get selected() {
    return this.#selection.unit;
  }

  /** What the marks show: one of MEASURES (mark-scale.js), from the next show() on. */
  set measure(value) {
    this.#rows.measure = value;
  }

  /** Shows the whole text; `written`: [[start, end]] of what the model wrote. The selection stays if its token does. */
  show(text, units, written) {
    const before = this.selected;
    const hadFocus = this.#page.contains(document.activeElement);
    this.#selection.forget();
    this.#page.tabIndex = 0;
    this.#rows.show(text, units, written);
    if (!before && !hadFocus) return;
    const token = before ? this.#rows.at(before.start) : this.#rows.inSight(); // the focus was on a page without tokens
    this.#select(token ?? this.#rows.end(1));
    if (before && this.selected?.tokens[0] === before.tokens[0]) this.#popover.move(this.#selection.token);
    else this.#popover.close();
    if (hadFocus) this.focus();
  }

  /** Appends a unit and its text. */
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
      if (isFar) return; // Ctrl+Enter generates
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

  // The token that a key leads to; null if there is none, undefined if this view does not handle the key.
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

// Geometry of tokens in the lines that the browser laid out. `beside(element, step)` returns the previous (-1) or next
// (1) token, or null.

// The token of the line above (-1) or below (1) that is nearest to `x`, or null if there is no such line.
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

// The first (-1) or last (1) token of the line.
function lineEnd(token, step, beside) {
  const from = topOf(token);
  let last = token;
  for (let one = beside(token, step); one && isSame(topOf(one), from); one = beside(one, step)) last = one;
  return last;
}

// The horizontal center of a token, px.
function middle(token) {
  const { left, right } = first(token);
  return (left + right) / 2;
}

// The widest rectangle of a token: the space of a word that begins a line is at the end of the previous line.
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
