// The body of POST /complete: converts values between what the user types into a field and JSON text. Numbers stay text,
// since a seed is an int64 and a JavaScript number has 53 bits. An invalid value is sent as a string, for the server to
// explain. Pure functions.

const ESCAPES = { "\\n": "\n", "\\r": "\r", "\\t": "\t", "\\\\": "\\" };
const TOKEN = /"(?:[^"\\]|\\.)*"|-?\d+(?:\.\d+)?(?:[eE][+-]?\d+)?/g;

/**
 * [[name, JSON text], ...] of the fields to send. `typed` maps a field to what the user typed into it; an empty one is
 * left out, so that the server's default applies. `parameters` (request-parameters.js) have the kinds; until they are known, what
 * looks like a number is one, and the rest is text.
 */
export function requestFields(prompt, typed, parameters = []) {
  const kinds = new Map(parameters.map(({ name, kind }) => [name, kind]));
  const fields = Object.entries(typed).map(([name, text]) => [name, literal(kinds.get(name) ?? guess(name), text)]);
  return [["prompt", JSON.stringify(prompt)], ["stream", "true"], ...fields.filter(([, json]) => json !== null)];
}

/** The body as JSON text. */
export function requestBody(prompt, typed, parameters) {
  return bodyOf(requestFields(prompt, typed, parameters));
}

/** The JSON text of requestFields(); `space` goes before each field, "" for a body on one line. */
export function bodyOf(fields, space = "") {
  const [between, end] = space === "" ? ["", ""] : [" ", "\n"];
  const parts = fields.map(([name, json]) => `${end}${space}${JSON.stringify(name)}:${between}${json}`);
  return `{${parts.join(",")}${end}}`;
}

// Fields whose text may look like a number.
function guess(name) {
  return ["source", "suffix"].includes(name) ? "text" : undefined;
}

/** JSON text of what was typed into a field of this kind (request-parameters.js; undefined if unknown), or null if it is empty. */
export function literal(kind, text) {
  const word = text.trim();
  if (kind === "text") return text === "" ? null : JSON.stringify(text);
  if (kind === "texts") return listed(lines(text).map((line) => JSON.stringify(line)));
  if (word === "") return null;
  if (kind === "integers") return listed(word.split(/[\s,]+/).filter(Boolean).map(numeral));
  if (kind === "boolean") return /^(true|false)$/.test(word) ? word : JSON.stringify(word);
  if (kind === "json") return isJson(word) ? word : JSON.stringify(word);
  return numeral(word);
}

/** The inverse: what the user would type to send this value (of parseExact()). */
export function typedAs(kind, value) {
  if (value === null || value === undefined) return "";
  if (kind === "texts") return [value].flat().map(escaped).join("\n");
  if (kind === "integers") return [value].flat().join(", ");
  const isPlain = typeof value === "string" && !(kind === "json" && isJson(value));
  return isPlain ? value : JSON.stringify(value);
}

/** The texts of a list typed one per line; \n, \r, \t and \\ are escapes. */
export function lines(text) {
  const read = (line) => line.replace(/\\[nrt\\]/g, (escape) => ESCAPES[escape]);
  return text.split("\n").filter((line) => line !== "").map(read);
}

function escaped(text) {
  const found = Object.entries(ESCAPES);
  return String(text).replace(/[\n\r\t\\]/g, (sign) => found.find(([, meant]) => meant === sign)[0]);
}

function listed(literals) {
  return literals.length ? `[${literals.join(",")}]` : null;
}

function numeral(word) {
  if (/^[+-]?\d+$/.test(word)) return String(BigInt(word));
  const isNumber = /^[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?$/i.test(word) && Number.isFinite(Number(word));
  return isNumber ? String(Number(word)) : JSON.stringify(word);
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}

/** JSON.parse, except that an integer that JavaScript would round, such as a seed, becomes a string of its digits. */
export function parseExact(json) {
  return JSON.parse(json.replace(TOKEN, (token) => (isLong(token) ? `"${token}"` : token)));
}

/** Whether these digits are an integer that JavaScript rounds. */
export function isLong(token) {
  return /^-?\d{16,}$/.test(token) && !Number.isSafeInteger(Number(token));
}
