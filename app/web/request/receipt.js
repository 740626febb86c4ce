// The receipt of a run, to be read, copied and replayed, and an input for a receipt from another user.

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
  #told = element("p"); // what became of copying and replaying
  #taken = element("p"); // and of the pasted receipt, next to its button
  #pasted = element("textarea");
  #handlers;

  /**
   * `replay()` runs it again and resolves to a sentence, `stop()` ends that early, `take(receipt)` uses one that was
   * pasted and resolves to a sentence. Whatever they throw is told by its message.
   */
  constructor(root, handlers) {
    this.#handlers = handlers;
    const copying = button("Copy receipt");
    copying.addEventListener("click", () => this.#copy());
    this.#replay.addEventListener("click", () => this.#again());
    this.#buttons.className = "exits";
    this.#rows.className = "receipt";
    this.#none.className = "told";
    for (const told of [this.#told, this.#taken]) {
      told.className = "told";
      told.setAttribute("role", "status");
    }
    put(root, this.#none, put(this.#buttons, copying, this.#replay), this.#told, this.#rows, this.#form());
    this.show(null);
  }

  /** The receipt of the run that one looks at, or null. */
  show(receipt) {
    if (receipt === this.#receipt && this.#rows.hidden === (receipt === null)) return;
    this.#receipt = receipt;
    this.#none.hidden = receipt !== null;
    this.#rows.hidden = this.#buttons.hidden = receipt === null;
    this.#told.textContent = "";
    this.#rows.replaceChildren(...(receipt === null ? [] : rowsOf(receipt).map(row)));
  }

  async #copy() {
    this.#told.textContent = (await copy(receiptJson(this.#receipt))) ? "Copied the receipt." : REFUSED;
  }

  async #again() {
    if (this.#replay.textContent === "Stop") return this.#handlers.stop();
    this.#replay.textContent = "Stop";
    await this.#tell(this.#told, "Replaying", () => this.#handlers.replay());
    this.#replay.textContent = "Replay";
  }

  // Says what `sentence()` resolves to, or why it failed, in `place`.
  async #tell(place, meanwhile, sentence) {
    const receipt = this.#receipt;
    const tell = (words) => this.#receipt === receipt && (place.textContent = words); // not beside another run's
    tell(meanwhile);
    try {
      tell(await sentence());
    } catch (error) {
      tell(error.name === "AbortError" ? "The replay was stopped." : error.message);
    }
  }

  #form() {
    const label = element("label", "A receipt that you were sent");
    Object.assign(this.#pasted, { id: "pasted-receipt", rows: 3, spellcheck: false, autocomplete: "off" });
    this.#pasted.placeholder = '{"weights_version": \u2026, "seed": \u2026, "settings": \u2026}';
    label.htmlFor = this.#pasted.id;
    const take = button("Use its settings");
    take.type = "submit";
    const form = put(element("form"), label, this.#pasted, take, this.#taken);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#tell(this.#taken, "", () => this.#handlers.take(readReceipt(this.#pasted.value)));
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
  const made = element("button", words);
  made.type = "button";
  return made;
}
