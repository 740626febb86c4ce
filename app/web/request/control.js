// Input controls by kind of parameter, each with `value`, a string, and focus(); and sliders and radio groups of numbers.

import { element, put } from "../elements.js";

const AREAS = ["text", "texts", "json"]; // kinds that may have several lines
const MODES = { integer: "numeric", number: "decimal", integers: "numeric" };

/** The control of a parameter (request-parameters.js). */
export function control(parameter) {
  const { kind, example } = parameter;
  const input = kind === "boolean" ? choice() : AREAS.includes(kind) ? area() : element("input");
  input.id = idOf(parameter);
  input.autocomplete = "off";
  input.spellcheck = false;
  input.autocapitalize = "off";
  if (MODES[kind]) input.inputMode = MODES[kind];
  if (kind !== "boolean") input.placeholder = example ? `such as ${example}` : "default";
  return input;
}

/** The id of a parameter's control. Prefixed, since the server may name a field like any id of the page. */
export function idOf({ name, group }) {
  return (group === "main" ? name : `setting-${name}`).replaceAll("_", "-");
}

/** Shows the default that applies while the control is empty. */
export function showDefault(input, value) {
  const isObject = typeof value === "object" && !Array.isArray(value);
  const shown = isObject ? JSON.stringify(value) : [value].flat().join(", ");
  const isEmpty = shown === "" || shown === "{}";
  if (input.localName === "select") input.options[0].textContent = `default (${value ? "on" : "off"})`;
  else input.placeholder = isEmpty ? "none" : shown;
}

function area() {
  const input = element("textarea");
  input.rows = 1; // grows with its text, by style sheet or by the user
  return input;
}

function choice() {
  const options = [["", "default"], ["true", "on"], ["false", "off"]];
  const input = put(element("select"), ...options.map(([, words]) => element("option", words)));
  options.forEach(([value], index) => (input.options[index].value = value));
  return input;
}

/** Radio buttons side by side for a few integers. The first is the default, which an empty text means. */
export class Segments {
  #other = null; // the button of a number that is not offered, which came with a receipt or a link

  /** `values` are numbers; `id` and `label` are the group's. */
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

/** A slider that is synchronized with a field. It shows the field's value clamped to its range, or the default of an empty
    field. */
export class Slider {
  #field;
  #resting = null; // the default, shown while the field is empty

  /** `field` is a number input, `sweep` the slider's range (request-parameters.js), `label` the field's name. */
  constructor(field, sweep, label) {
    this.#field = field;
    this.element = element("input");
    Object.assign(this.element, { type: "range", className: "slider", ...sweep });
    this.element.setAttribute("aria-label", `Slide: ${label}`);
    this.element.addEventListener("input", () => this.#slid());
    this.show();
  }

  /** Sets the default, which is shown while the field is empty. */
  rest(value) {
    this.#resting = value;
    this.show();
  }

  /** Updates the slider after the field has changed. */
  show() {
    const text = this.#field.value.trim();
    const shown = text === "" ? (this.#resting ?? this.element.min) : text;
    if (Number.isFinite(Number(shown))) this.element.value = Number(shown);
    this.element.classList.toggle("resting", text === "");
    this.element.setAttribute("aria-valuetext", text === "" ? `${shown}, the default` : text);
    const { min, max, valueAsNumber: value } = this.element;
    this.element.style.setProperty("--at", (value - min) / (max - min));
  }

  // The input event bubbles, so listeners on parent elements find the field up to date.
  #slid() {
    this.#field.value = this.element.value;
    this.show();
  }
}
