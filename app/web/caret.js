// Where the next run writes: at the end of the text, at the caret, or over the selection. If the model cannot read the text
// after the caret, the user chooses between caret and end, and the choice is stored.

import { rewritten } from "./text/sentences.js";

const ALTERNATIVES = 3; // number of rewritings of a selection if n is 1
const CHARACTERS = 3; // assumed of a token, at least, to derive max_tokens from the selection's length
const MARGIN = 8; // tokens added to that

export class Caret {
  #elements;
  #page;
  #choice; // "caret", "end", or "" for none yet
  #then = null; // what to do once the user has chosen

  /**
   * `elements`: { radios [caret, end], dialog (a popover with two buttons) }. `page`: { text(), selection() of the sheet, or
   * null if another view is shown, canFillIn(text) whether the model can read the text after the caret, onchange() }.
   * `stored`: an earlier value of `data`; anything else counts as a first visit.
   */
  constructor({ radios, dialog }, page, stored) {
    [this.#elements, this.#page] = [{ radios, dialog }, page];
    this.restore(stored);
    for (const radio of radios) radio.addEventListener("change", () => this.#choose(radio.value));
    for (const button of dialog.querySelectorAll("button")) button.addEventListener("click", () => this.#decide(button.value));
    document.addEventListener("selectionchange", () => page.onchange());
  }

  /** Restores the choice of another document. */
  restore(stored) {
    this.#choice = ["caret", "end"].includes(stored) ? stored : "";
  }

  get data() {
    return this.#choice;
  }

  /** Where the next run writes: null for the end, else { start, end, isInfill }; `end` is `start` if nothing is replaced. */
  get span() {
    const text = this.#page.text();
    const selection = this.#page.selection();
    const isAtEnd = !selection || text.slice(selection.start).trim() === "";
    if (isAtEnd) return null;
    const selected = text.slice(selection.start, selection.end).trim();
    const isRewriting = selected !== "";
    if (!isRewriting && this.#mode !== "caret") return null;
    const { start, end } = isRewriting ? rewritten(text, selection) : { start: selection.start, end: selection.start };
    if (isRewriting && text.slice(start, end).trim() === text.trim()) return null; // no text around it to rewrite it from
    return { start, end, isInfill: end < text.length && this.#page.canFillIn(text) };
  }

  /** Whether the user has to choose first. */
  get isOpen() {
    return this.#mode === "" && this.#isInMiddle;
  }

  /** Request fields for this span: the fields of `typed` that it changes. */
  fields({ start, end, isInfill }, typed) {
    if (end === start) return {};
    const tokens = Math.ceil((end - start) / CHARACTERS) + MARGIN;
    const most = Number(typed.max_tokens) || Infinity;
    const n = Number(typed.n) > 1 ? typed.n : String(ALTERNATIVES);
    return isInfill ? { n } : { n, max_tokens: String(Math.min(tokens, most)) };
  }

  /** Asks the user to choose, then calls `then`. */
  ask(then) {
    this.#then = then;
    this.#elements.dialog.showPopover();
    this.#elements.dialog.querySelector("button").focus();
  }

  show() {
    for (const radio of this.#elements.radios) radio.checked = radio.value === this.#mode;
  }

  get #mode() {
    return this.#choice || (this.#page.canFillIn(this.#page.text()) ? "caret" : "");
  }

  get #isInMiddle() {
    const { start, end } = this.#page.selection() ?? { start: Infinity, end: Infinity };
    const text = this.#page.text();
    return text.slice(start).trim() !== "" && text.slice(start, end).trim() === "";
  }

  #choose(choice) {
    this.#choice = choice;
    this.show();
    this.#page.onchange();
  }

  #decide(choice) {
    this.#choose(choice);
    this.#elements.dialog.hidePopover();
    this.#then();
  }
}
