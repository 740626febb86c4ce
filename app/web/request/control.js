// Input controls by type of parameter: each has `value`, a string, and focus().

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
