// The panel of request settings: the main ones visible, the others collapsed, each as the server describes it. Keeps values
// exactly as the user typed them.

import { classed, element, put } from "../elements.js";
import { Field, SeedField } from "./field.js";
import { FIRST } from "./request-parameters.js";

const START = { max_tokens: "128" };
// The service's defaults (docs/api.md) for fields without a default of the weights; the first run reports the actual ones.
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
  #parameters = []; // empty until the server's description has arrived
  #held = {}; // typed values, also of fields that do not exist yet
  #main = classed("div", "main-settings");
  #more = classed("div", "more-settings");
  #hint = classed("p", "hint", "This line explains the setting with the focus.");
  #folded = element("details");
  #count = classed("span", "count");
  #reset = element("button", "Reset all");

  /** `onchange()`: the user changed a setting. */
  constructor(root, { onchange }) {
    Object.assign(this.#reset, { type: "button", className: "quiet" });
    const title = element("h2", "Settings");
    title.tabIndex = -1;
    const head = put(classed("div", "panel-head"), title, this.#count, this.#reset);
    this.#reset.addEventListener("click", () => {
      this.reset();
      title.focus(); // the button with the focus has been hidden
      onchange();
    });
    put(this.#folded, element("summary", "More settings"), this.#more);
    this.#hint.setAttribute("aria-hidden", "true"); // screen readers read the field's own description
    put(root, head, this.#main, this.#hint, this.#folded);
    const showHint = ({ target }) => this.#showHint(target);
    for (const event of ["focusin", "pointerover"]) this.#main.addEventListener(event, showHint);
    root.addEventListener("input", () => (this.#changed(), onchange()));
    this.#lay(FIRST);
  }

  /** Builds the fields for the server's parameters (request-parameters.js); `defaults` come with the weights. Keeps typed values. */
  build(parameters, defaults = {}) {
    this.#parameters = parameters;
    this.#lay(parameters);
    const resting = { ...NEUTRAL, ...defaults };
    for (const field of this.#fields) if (field.name in resting) field.showDefault(resting[field.name]);
  }

  /** The parameters of the last build(). */
  get parameters() {
    return this.#parameters;
  }

  /** { name: text }; an empty text means the server's default. */
  get typed() {
    const typed = Object.fromEntries(this.#fields.map((field) => [field.name, field.typed]));
    return this.#parameters.length ? typed : { ...this.#held, ...typed };
  }

  /** Sets the fields that `typed` names. */
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

  /** Expands what hides this setting. */
  open(name, { withFocus }) {
    const field = this.#fields.find((one) => one.name === name);
    if (field && this.#more.contains(field.element)) this.#folded.open = true;
    if (withFocus) field?.focus();
  }

  /** Shows the server's value for each empty field; for the seed, the one it drew. */
  showDefaults(resolved) {
    for (const field of this.#fields) {
      if (field.typed === "" && resolved[field.name] != null) field.showDefault(resolved[field.name]);
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
    const again = before?.isConnected ? null : document.getElementById(before?.id); // restores the focus
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

  #showHint(target) {
    const field = this.#fields.find((one) => one.element.contains(target));
    if (field) this.#hint.textContent = field.help;
  }
}
