// Input controls by type of parameter: each has `value`, a string, and focus(). Sliders and choices of a few numbers, too.

import { element, put } from "../elements.js";

const AREAS = ["text", "texts", "json"]; // what may have more than one line
const MODES = { integer: "numeric", number: "decimal", integers: "numeric" };

/** The control of a parameter (schema.js). */
export function control(parameter) {
  const { kind, example } = parameter;
  const made = kind === "boolean" ? choice() : AREAS.includes(kind) ? area() : element("input");
  made.id = idOf(parameter);
  made.autocomplete = "off";
  made.spellcheck = false;
  made.autocapitalize = "off";
  if (MODES[kind]) made.inputMode = MODES[kind];
  if (kind !== "boolean") made.placeholder = example ? `such as ${example}` : "default";
  return made;
}

/** The id of a parameter's control. The server may call a field whatever it likes: only the main ones are known. */
export function idOf({ name, group }) {
  return (group === "main" ? name : `setting-${name}`).replaceAll("_", "-");
}

/** Shows what holds where the control is left empty. */
export function explain(made, value) {
  const isObject = typeof value === "object" && !Array.isArray(value);
  const shown = isObject ? JSON.stringify(value) : [value].flat().join(", ");
  const isEmpty = shown === "" || shown === "{}";
  if (made.localName === "select") made.options[0].textContent = `default (${value ? "on" : "off"})`;
  else made.placeholder = isEmpty ? "none" : shown;
}

function area() {
  const made = element("textarea");
  made.rows = 1; // grows with its text, by style sheet or by hand
  return made;
}

function choice() {
  const options = [["", "default"], ["true", "on"], ["false", "off"]];
  const made = put(element("select"), ...options.map(([, words]) => element("option", words)));
  options.forEach(([value], place) => (made.options[place].value = value));
  return made;
}

/** A small choice between whole numbers, one of which is chosen: radio buttons side by side. Its first one is what
    holds anyway, so it stands for an empty text. */
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

/** A slider that is in step with a field. The field holds the truth: the slider shows it as well as it can, at its end
    where the field says more, and at what holds anyway where the field says nothing. */
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
