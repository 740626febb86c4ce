// Builds the body of POST /complete as text (literal.js says why). Pure.

import { literal } from "./literal.js";

/**
 * [[name, JSON text], ...] of everything that is sent. `typed` maps a field to what the user typed into it; an empty
 * one is left out, and the server's default holds. `parameters` (schema.js) tell the kinds; before they are known a
 * number is a number and the rest is text.
 */
export function requestFields(prompt, typed, parameters = []) {
  const kinds = new Map(parameters.map(({ name, kind }) => [name, kind]));
  const fields = Object.entries(typed).map(([name, text]) => [name, literal(kinds.get(name) ?? guess(name), text)]);
  return [["prompt", JSON.stringify(prompt)], ["stream", "true"], ...fields.filter(([, json]) => json !== null)];
}

/** The body itself. */
export function requestBody(prompt, typed, parameters) {
  return bodyOf(requestFields(prompt, typed, parameters));
}

/** Of requestFields(); `space` goes before each field, "" for a body on one line. */
export function bodyOf(fields, space = "") {
  const [between, end] = space === "" ? ["", ""] : [" ", "\n"];
  const parts = fields.map(([name, json]) => `${end}${space}${JSON.stringify(name)}:${between}${json}`);
  return `{${parts.join(",")}${end}}`;
}

// What these are may look like a number, and is text all the same.
function guess(name) {
  return ["source", "suffix"].includes(name) ? "text" : undefined;
}
