// One setting: its name, control, slider if it has a range, button back to the default, description, and a message about
// an invalid value, which is marked but sent as typed.

import { element, put } from "../elements.js";
import { control, idOf, Segments, showDefault, Slider } from "./control.js";
import { complaint, hint } from "./value-range.js";

const MOST_ABREAST = 4; // radio buttons that fit side by side

export class Field {
  #parameter;
  #start;
  #slider = null;
  #reset = element("button", "reset");
  #wrong = element("p");

  /** `parameter`: see request-parameters.js; `start`: the initial text, which a reset restores. */
  constructor(parameter, start = "") {
    [this.#parameter, this.#start] = [parameter, start];
    this.element = element("div");
    this.element.className = `field ${parameter.kind}`;
    this.control = parameter.name === "n" ? segments(parameter) : control(parameter);
    this.#build();
    this.fill(start);
  }

  get name() {
    return this.#parameter.name;
  }

  /** Description and allowed values. */
  get help() {
    const words = this.control instanceof Segments ? "" : hint(this.#parameter);
    return `${this.#parameter.help} ${words && `${words[0].toUpperCase()}${words.slice(1)}.`}`.trim();
  }

  get typed() {
    const { value } = this.control;
    return ["text", "texts"].includes(this.#parameter.kind) ? value : value.trim();
  }

  get changed() {
    return this.typed !== this.#start && this.typed !== "";
  }

  fill(text) {
    this.control.value = text;
    this.show();
  }

  reset() {
    this.fill(this.#start);
  }

  /** Shows the server's default for an empty field. */
  showDefault(value) {
    if (this.control instanceof Segments) return;
    showDefault(this.control, value);
    this.#slider?.rest(value);
  }

  focus() {
    this.control.focus();
  }

  /** Updates everything else after the control has changed. */
  show() {
    const wrong = complaint(this.#parameter, this.typed);
    if (this.#wrong.textContent !== wrong) this.#wrong.textContent = wrong;
    this.input.setAttribute("aria-invalid", String(wrong !== ""));
    this.element.classList.toggle("changed", this.changed);
    this.#reset.hidden = !this.changed;
    this.#slider?.show();
  }

  /** The control's element. */
  get input() {
    return this.control instanceof Segments ? this.control.element : this.control;
  }

  #build() {
    const { label, sweep } = this.#parameter;
    const id = idOf(this.#parameter);
    const caption = element(this.control instanceof Segments ? "span" : "label", label);
    caption.className = "caption";
    caption.htmlFor = id;
    Object.assign(this.#reset, { type: "button", className: "quiet reset" });
    this.#reset.setAttribute("aria-label", `Reset ${label}`);
    this.#reset.addEventListener("click", () => this.#back());
    Object.assign(this.#wrong, { className: "wrong", id: `${id}-wrong` });
    this.#wrong.setAttribute("aria-live", "polite");
    const help = element("p", this.help);
    Object.assign(help, { className: "help", id: `${id}-help` });
    this.input.setAttribute("aria-describedby", `${id}-wrong ${id}-help`);
    put(this.element, caption, this.#reset, this.input);
    if (sweep && !(this.control instanceof Segments)) {
      this.#slider = new Slider(this.control, sweep, label);
      this.element.append(this.#slider.element);
    }
    put(this.element, this.#wrong, help);
    this.element.addEventListener("input", () => this.show());
  }

  #back() {
    this.reset();
    this.focus(); // the button with the focus has been removed
    this.input.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

function segments(parameter) {
  const { label, minimum = 1, maximum = Infinity } = parameter;
  const last = Math.min(maximum, MOST_ABREAST);
  const values = Array.from({ length: last - minimum + 1 }, (_, place) => minimum + place);
  return new Segments(values, { id: idOf(parameter), label });
}

/** The seed: random for each run, and shown afterwards, or locked, to get the same text again. A string of digits, since a
    seed is an int64 and a JavaScript number has 53 bits. */
export class SeedField extends Field {
  #lock = element("button", "Lock");
  #used = null; // seed of the last run

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

  /** Shows the random seed that the server drew. */
  showDefault(value) {
    this.#used = String(value);
    this.control.placeholder = `random, was ${shortSeed(this.#used)}`;
  }

  show() {
    super.show();
    if (!(#lock in this)) return; // called by the superclass's constructor
    const locked = this.typed !== "";
    this.#lock.setAttribute("aria-pressed", String(locked));
    this.#lock.title = locked ? "Draw another seed each time" : "Keep the seed, so that the same text comes again";
  }

  // Locking without a previous run draws a seed here.
  #turn() {
    this.fill(this.typed === "" ? (this.#used ?? drawSeed()) : "");
    this.control.dispatchEvent(new Event("input", { bubbles: true }));
  }
}

/** A random seed of 53 bits, as the server draws them. */
export function drawSeed() {
  const [high, low] = crypto.getRandomValues(new Uint32Array(2));
  return String((BigInt(high >>> 11) << 32n) | BigInt(low));
}

/** The seed, abbreviated if it is too long. */
export function shortSeed(seed) {
  return seed.length > 8 ? `${seed.slice(0, 6)}\u2026` : seed;
}
