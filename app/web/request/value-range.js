// The values that a parameter allows, in words, and whether a typed text is one. Only for marking: an invalid value is sent
// as typed. Pure functions.

import { lines, literal } from "./request-body.js";

const LINES = "one text a line (\\n for a line end)";

/** Such as "a number from 0 to 10", to follow "Allowed: ". */
export function allowed(parameter) {
  const { kind, choices, maxItems } = parameter;
  if (choices) return `one of ${choices.join(", ")}`;
  if (kind === "integer") return `a whole number${span(wholeLimits(parameter))}`;
  if (kind === "number") return `a number${span(parameter)}`;
  if (kind === "boolean") return "on or off";
  if (kind === "integers") return `whole numbers${span(wholeLimits(parameter))}${atMost(maxItems, "of them")}`;
  if (kind === "text") return `a text${characters(parameter)}`;
  if (kind === "texts") return `${LINES}${atMost(maxItems, "lines")}${characters(parameter, " each")}`;
  return "JSON";
}

/** The same for a description, or "" if it would not help: limits such as 2 ** 31, or just "JSON". */
export function hint(parameter) {
  const { kind, maximum, below } = parameter;
  if (kind === "texts") return LINES;
  if (kind === "integers") return "whole numbers, separated by commas";
  const words = allowed(parameter);
  const isWide = kind === "integer" && !((maximum ?? below) < 2 ** 31);
  return isWide || kind === "boolean" || ["a number", "a text", "JSON"].includes(words) ? "" : words;
}

/** A sentence about a text that is not allowed, or "". */
export function complaint(parameter, text) {
  const json = literal(parameter.kind, text);
  return json === null || fits(parameter, text, json) ? "" : `Allowed: ${allowed(parameter)}.`;
}

function fits(parameter, text, json) {
  const { kind, choices, maxItems = Infinity } = parameter;
  if (choices) return choices.map(String).includes(text.trim());
  if (kind === "integer") return isWhole(json, parameter);
  if (kind === "number") return json[0] !== '"' && isWithin(Number(json), parameter);
  if (kind === "boolean") return json[0] !== '"';
  if (kind === "text") return hasLength(text, parameter);
  if (kind === "texts") {
    const texts = lines(text);
    return texts.length <= maxItems && texts.every((one) => hasLength(one, parameter));
  }
  if (kind === "json") return json === text.trim();
  const items = json.slice(1, -1).split(",");
  return items.length <= maxItems && items.every((item) => isWhole(item, parameter));
}

function isWhole(json, parameter) {
  return /^-?\d+$/.test(json) && isWithin(BigInt(json), parameter);
}

// BigInt and number compare exactly in JavaScript.
function isWithin(value, { minimum = -Infinity, maximum = Infinity, above = -Infinity, below = Infinity }) {
  return value >= minimum && value <= maximum && value > above && value < below;
}

// The server counts code points, JavaScript UTF-16 code units.
function hasLength(text, { minLength = 0, maxLength = Infinity }) {
  const { length } = [...text];
  return length >= minLength && length <= maxLength;
}

// For integers, turns an exclusive limit into an inclusive one. 2 ** 63 - 1 needs a BigInt.
function wholeLimits({ minimum, maximum, above, below }) {
  return {
    minimum: minimum === undefined && above !== undefined ? BigInt(above) + 1n : exactly(minimum),
    maximum: maximum === undefined && below !== undefined ? BigInt(below) - 1n : exactly(maximum),
  };
}

function exactly(limit) {
  return limit === undefined ? undefined : BigInt(limit);
}

function span({ minimum, maximum, above, below }) {
  if (minimum !== undefined && maximum !== undefined) return ` from ${minimum} to ${maximum}`;
  const low = minimum === undefined ? above !== undefined && `above ${above}` : `at least ${minimum}`;
  const high = maximum === undefined ? below !== undefined && `below ${below}` : `at most ${maximum}`;
  const limits = [low, high].filter(Boolean).join(" and ");
  return limits && ` ${limits}`;
}

function characters({ minLength, maxLength }, each = "") {
  if (maxLength === undefined) return "";
  return ` of ${minLength ? `${minLength} to` : "at most"} ${maxLength} characters${each}`;
}

function atMost(count, what) {
  return count === undefined ? "" : `, at most ${count} ${what}`;
}
