// A slider that is in step with a field. The field holds the truth: the slider shows it as well as it can, at its end
// where the field says more, and at what holds anyway where the field says nothing.

import { element } from "../elements.js";

export class Slider {
  #field;
  #resting = null; // what holds where the field is empty

  /** `field` is the input of a number, `sweep` where it goes (schema.js), `label` its name. */
  constructor(field, sweep, label) {
    this.#field = field;
    this.element = element("input");
    Object.assign(this.element, { type: "range", className: "slider", ...sweep });
    this.element.setAttribute("aria-label", `Slide: ${label}`);
    this.element.addEventListener("input", () => this.#slid());
    this.show();
  }

  /** What holds where the field is empty. */
  rest(value) {
    this.#resting = value;
    this.show();
  }

  /** The field has changed. */
  show() {
    const text = this.#field.value.trim();
    const shown = text === "" ? (this.#resting ?? this.element.min) : text;
    if (Number.isFinite(Number(shown))) this.element.value = Number(shown);
    this.element.classList.toggle("resting", text === "");
    this.element.setAttribute("aria-valuetext", text === "" ? `${shown}, the default` : text);
    const { min, max, valueAsNumber: value } = this.element;
    this.element.style.setProperty("--at", (value - min) / (max - min));
  }

  // The input event bubbles to listeners on parent elements, which then find the field up to date.
  #slid() {
    this.#field.value = this.element.value;
    this.show();
  }
}
