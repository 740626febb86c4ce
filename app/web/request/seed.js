// The seed: random each time, and told; or locked, so that the same text comes again. A seed is an int64, of which a
// JavaScript number holds 53 bits: here it is a text of digits.

import { element } from "../elements.js";
import { Field } from "./field.js";

export class SeedField extends Field {
  #lock = element("button", "Lock");
  #used = null; // the seed of the last run

  constructor(parameter, start = "") {
    super(parameter, start);
    Object.assign(this.#lock, { type: "button", className: "lock" });
    this.#lock.setAttribute("aria-label", "Lock the seed");
    this.#lock.addEventListener("click", () => this.#turn());
    this.control.placeholder = "random";
    this.control.after(this.#lock);
    this.element.classList.add("seed");
    this.show();
  }

  /** A random seed was asked for, and this is the one that the server drew. */
  explain(value) {
    this.#used = String(value);
    this.control.placeholder = `random, was ${value}`;
  }

  show() {
    super.show();
    if (!(#lock in this)) return; // the field shows itself once before it is all there
    const locked = this.typed !== "";
    this.#lock.setAttribute("aria-pressed", String(locked));
    this.#lock.title = locked ? "Draw another seed each time" : "Keep the seed, so that the same text comes again";
  }

  // Locked without a run to take it from, it is drawn here.
  #turn() {
    this.fill(this.typed === "" ? (this.#used ?? drawSeed()) : "");
    this.control.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

/** A random seed, as the server would draw it: 53 bits. */
export function drawSeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return String((BigInt(high >>> 11) << 32n) | BigInt(low));
}
