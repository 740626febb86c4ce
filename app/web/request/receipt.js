// Shows the receipt of a run, copies and replays it, and takes a receipt from another user.

import { element, put } from "../elements.js";
import { copy, REFUSED } from "./clipboard.js";
import { readReceipt, receiptJson, rowsOf } from "./receipt-facts.js";

const NONE = "No receipt yet: a run has one when it has come to its end.";

export class Receipt {
  #receipt = null;
  #rows = element("dl");
  #none = element("p", NONE);
  #buttons = element("div");
  #replay = button("Replay");
  #outcome = element("p"); // of copying and replaying
  #pasteOutcome = element("p"); // of using a pasted receipt, next to its button
  #pasted = element("textarea");
  #handlers;

  /**
   * `replay()` repeats the run and resolves to a sentence, `stop()` ends that early, and `take(receipt)` uses a pasted
   * receipt and resolves to a sentence. Messages of their errors are shown.
   */
  constructor(root, handlers) {
    this.#handlers = handlers;
    const copying = button("Copy receipt");
    copying.addEventListener("click", () => this.#copy());
    this.#replay.addEventListener("click", () => this.#again());
    this.#buttons.className = "exits";
    this.#rows.className = "receipt";
    this.#none.className = "outcome";
    for (const line of [this.#outcome, this.#pasteOutcome]) {
      line.className = "outcome";
      line.setAttribute("role", "status");
    }
    put(root, this.#none, put(this.#buttons, copying, this.#replay), this.#outcome, this.#rows, this.#form());
    this.show(null);
  }

  /** Shows the receipt of the current run, or null. */
  show(receipt) {
    if (receipt === this.#receipt && this.#rows.hidden === (receipt === null)) return;
    this.#receipt = receipt;
    this.#none.hidden = receipt !== null;
    this.#rows.hidden = this.#buttons.hidden = receipt === null;
    this.#outcome.textContent = "";
    this.#rows.replaceChildren(...(receipt === null ? [] : rowsOf(receipt).map(row)));
  }

  async #copy() {
    this.#outcome.textContent = (await copy(receiptJson(this.#receipt))) ? "Copied the receipt." : REFUSED;
  }

  async #again() {
    if (this.#replay.textContent === "Stop") return this.#handlers.stop();
    this.#replay.textContent = "Stop";
    await this.#report(this.#outcome, "Replaying", () => this.#handlers.replay());
    this.#replay.textContent = "Replay";
  }

  // Shows what `sentence()` resolves to, or why it failed, in `line`.
  async #report(line, meanwhile, sentence) {
    const receipt = this.#receipt;
    const show = (words) => this.#receipt === receipt && (line.textContent = words); // unless another run's is shown
    show(meanwhile);
    try {
      show(await sentence());
    } catch (error) {
      show(error.name === "AbortError" ? "The replay was stopped." : error.message);
    }
  }

  #form() {
    const label = element("label", "A receipt that you were sent");
    Object.assign(this.#pasted, { id: "pasted-receipt", rows: 3, spellcheck: false, autocomplete: "off" });
    this.#pasted.placeholder = '{"weights_version": \u2026, "seed": \u2026, "settings": \u2026}';
    label.htmlFor = this.#pasted.id;
    const take = button("Use its settings");
    take.type = "submit";
    const form = put(element("form"), label, this.#pasted, take, this.#pasteOutcome);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#report(this.#pasteOutcome, "", () => this.#handlers.take(readReceipt(this.#pasted.value)));
    });
    const folded = put(element("details"), element("summary", "Use another receipt"), form);
    folded.className = "paste";
    return folded;
  }
}

function row([name, words, whole]) {
  const value = element("dd", words);
  if (whole) value.title = whole;
  return put(element("div"), element("dt", name), value);
}

function button(words) {
  const button = element("button", words);
  button.type = "button";
  return button;
}
