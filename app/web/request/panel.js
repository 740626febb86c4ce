// The settings panel of a request: the main ones visible, the others folded away, each as the server describes it.
// Values are kept exactly as the user typed them.

import { classed, element, put } from "../elements.js";
import { Field, SeedField } from "./field.js";
import { FIRST } from "./schema.js";

const START = { max_tokens: "128" };
// What holds where neither the request nor the weights say anything (docs/api.md); the first run tells it for sure.
const NEUTRAL = {
  temperature: 1,
  top_p: 1,
  top_k: 0,
  min_p: 0,
  typical_p: 1,
  repetition_penalty: 1,
  presence_penalty: 0,
  frequency_penalty: 0,
  max_tokens: 128,
  min_tokens: 0,
};

export class Panel {
  #fields = [];
  #parameters = []; // empty until the server has described itself
  #held = {}; // what was typed, also into fields that are not there yet
  #main = classed("div", "main-settings");
  #more = classed("div", "more-settings");
  #hint = classed("p", "hint", "What a setting does is told here.");
  #folded = element("details");
  #count = classed("span", "count");
  #reset = element("button", "Reset all");

  /** `onchange()` is called when the user changed a setting. */
  constructor(root, { onchange }) {
    Object.assign(this.#reset, { type: "button", className: "quiet" });
    const title = element("h2", "Settings");
    title.tabIndex = -1;
    const head = put(classed("div", "panel-head"), title, this.#count, this.#reset);
    this.#reset.addEventListener("click", () => {
      this.reset();
      title.focus(); // the button is gone, and its focus with it
      onchange();
    });
    put(this.#folded, element("summary", "More settings"), this.#more);
    this.#hint.setAttribute("aria-hidden", "true"); // a screen reader has it from the field
    put(root, head, this.#main, this.#hint, this.#folded);
    const tell = ({ target }) => this.#tell(target);
    for (const event of ["focusin", "pointerover"]) this.#main.addEventListener(event, tell);
    root.addEventListener("input", () => (this.#changed(), onchange()));
    this.#lay(FIRST);
  }

  /** What the server says that there is (schema.js); `defaults` are those of the weights. Keeps what was typed. */
  build(parameters, defaults = {}) {
    this.#parameters = parameters;
    this.#lay(parameters);
    const resting = { ...NEUTRAL, ...defaults };
    for (const field of this.#fields) if (field.name in resting) field.explain(resting[field.name]);
  }

  /** What build() was told. */
  get parameters() {
    return this.#parameters;
  }

  /** { name: text }; an empty text stands for the server's default. */
  get typed() {
    const typed = Object.fromEntries(this.#fields.map((field) => [field.name, field.typed]));
    return this.#parameters.length ? typed : { ...this.#held, ...typed };
  }

  /** Fields that `typed` does not name stay as they are. */
  fill(typed) {
    Object.assign(this.#held, typed);
    for (const field of this.#fields) if (field.name in typed) field.fill(typed[field.name]);
    this.#changed();
  }

  reset() {
    this.#held = {};
    for (const field of this.#fields) field.reset();
    this.#changed();
  }

  /** Unfolds the settings as far as it takes to see this one. */
  open(name, { withFocus }) {
    const field = this.#fields.find((one) => one.name === name);
    if (field && this.#more.contains(field.element)) this.#folded.open = true;
    if (withFocus) field?.focus();
  }

  /** Shows in every field that is left empty what the server puts in its place; for the seed, the one it drew. */
  explain(resolved) {
    for (const field of this.#fields) {
      if (field.typed === "" && resolved[field.name] != null) field.explain(resolved[field.name]);
    }
  }

  #lay(parameters) {
    this.#held = { ...this.#held, ...this.#typedNow };
    const { activeElement: before } = document;
    const selection = before && [before.selectionStart, before.selectionEnd];
    this.#fields = parameters.map((parameter) => this.#field(parameter));
    const of = (group) => parameters.flatMap((one, place) => (one.group === group ? this.#fields[place].element : []));
    this.#main.replaceChildren(...of("main"));
    this.#more.replaceChildren(...of("more"));
    this.#folded.hidden = this.#more.children.length === 0;
    this.#changed();
    const again = before?.isConnected ? null : document.getElementById(before?.id); // one who was typing goes on typing
    again?.focus();
    if (again && selection[0] !== null) again.setSelectionRange?.(...selection);
  }

  #field(parameter) {
    const { name } = parameter;
    const field = new (name === "seed" ? SeedField : Field)(parameter, START[name]);
    if (this.#held[name] !== undefined) field.fill(this.#held[name]);
    return field;
  }

  get #typedNow() {
    return Object.fromEntries(this.#fields.map((field) => [field.name, field.typed]));
  }

  #changed() {
    const count = this.#fields.filter((field) => field.changed).length;
    this.#count.textContent = count ? `${count} changed` : "";
    this.#reset.hidden = count === 0;
    const more = this.#fields.filter((field) => field.changed && this.#more.contains(field.element)).length;
    this.#folded.firstElementChild.textContent = more ? `More settings (${more} changed)` : "More settings";
  }

  #tell(target) {
    const field = this.#fields.find((one) => one.element.contains(target));
    if (field) this.#hint.textContent = field.help;
  }
}
