// A small choice between whole numbers, one of which is chosen: radio buttons side by side. Its first one is what
// holds anyway, so it stands for an empty text.

import { element, put } from "../elements.js";

export class Segments {
  #other = null; // the place of a number that is not offered: it came with a receipt or a link, and is shown as it is

  /** `values` are numbers, `id` is for the group, `label` its name. */
  constructor(values, { id, label }) {
    this.element = element("div");
    this.element.id = id;
    this.element.className = "segments";
    this.element.setAttribute("role", "radiogroup");
    this.element.setAttribute("aria-label", label);
    for (const value of values) this.#add(String(value));
    this.value = "";
  }

  get value() {
    const [first] = this.#radios;
    const chosen = this.#radios.find((radio) => radio.checked);
    return chosen === first ? "" : chosen.value;
  }

  set value(text) {
    const wanted = text.trim() === "" ? this.#radios[0].value : text.trim();
    this.#other?.remove();
    const offered = this.#radios.find(({ value }) => value === wanted);
    const radio = offered ?? this.#add(wanted);
    this.#other = offered ? null : radio.parentElement;
    radio.checked = true;
  }

  focus() {
    this.#radios.find((radio) => radio.checked).focus();
  }

  get #radios() {
    return [...this.element.querySelectorAll("input")];
  }

  #add(value) {
    const radio = element("input");
    Object.assign(radio, { type: "radio", name: this.element.id, value });
    put(this.element, put(element("label"), radio, element("span", value)));
    return radio;
  }
}
