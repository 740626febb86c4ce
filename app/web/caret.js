// Where the next run writes: at the end of the text, at the caret, or in place of what is selected. A model that cannot
// read what stands behind the caret leaves the user a choice, which is remembered.

import { rewritten } from "./text/sentences.js";

const ALTERNATIVES = 3; // to a selection, where the settings ask for one continuation
const CHARACTERS = 3; // of a token, at least: so many tokens can say what the selection said
const MARGIN = 8; // tokens

export class Caret {
  #elements;
  #page;
  #choice; // "caret", "end", or "" for none yet
  #then = null; // what the choice was asked for

  /**
   * `elements`: { radios [caret, end], dialog (a popover with two buttons) }. `page`: { text(), selection() as the sheet has
   * it, or null where the sheet is not seen, canFillIn(text) whether the model reads what is behind, onchange() }. `stored` is
   * what `data` gave before, or anything else on a first visit.
   */
  constructor({ radios, dialog }, page, stored) {
    [this.#elements, this.#page] = [{ radios, dialog }, page];
    this.restore(stored);
    for (const radio of radios) radio.addEventListener("change", () => this.#choose(radio.value));
    for (const button of dialog.querySelectorAll("button")) button.addEventListener("click", () => this.#decide(button.value));
    document.addEventListener("selectionchange", () => page.onchange());
  }

  /** Takes the choice that was made for another document. */
  restore(stored) {
    this.#choice = ["caret", "end"].includes(stored) ? stored : "";
  }

  get data() {
    return this.#choice;
  }

  /** null at the end; else { start, end, isInfill }, `end` being `start` where nothing is replaced. */
  get span() {
    const text = this.#page.text();
    const selection = this.#page.selection();
    const isAtEnd = !selection || text.slice(selection.start).trim() === "";
    if (isAtEnd) return null;
    const selected = text.slice(selection.start, selection.end).trim();
    const isRewriting = selected !== "";
    if (!isRewriting && this.#mode !== "caret") return null;
    const { start, end } = isRewriting ? rewritten(text, selection) : { start: selection.start, end: selection.start };
    if (isRewriting && text.slice(start, end).trim() === text.trim()) return null; // nothing stands around it to rewrite it by
    return { start, end, isInfill: end < text.length && this.#page.canFillIn(text) };
  }

  /** Whether the user has to choose first. */
  get isOpen() {
    return this.#mode === "" && this.#isInMiddle;
  }

  /** The fields of a request for this span, where they are other than the settings: `typed`. */
  fields({ start, end, isInfill }, typed) {
    if (end === start) return {};
    const tokens = Math.ceil((end - start) / CHARACTERS) + MARGIN;
    const most = Number(typed.max_tokens) || Infinity;
    const n = Number(typed.n) > 1 ? typed.n : String(ALTERNATIVES);
    return isInfill ? { n } : { n, max_tokens: String(Math.min(tokens, most)) };
  }

  /** Asks for the choice, and then calls `then`. */
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
