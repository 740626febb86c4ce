// Receipts: parsing, converting to settings, and comparing two runs. A receipt's `settings` and `seed`, sent with the same
// prompt, give the same text on the same weights, build and hardware.

import { parseExact, typedAs } from "./request-body.js";

const EXPECTED = "A receipt is the JSON that a run ends with: an object with weights_version, seed and settings.";
// Settings that the page sets itself and that do not change the text, unlike the truncation of the prompt.
const NOT_SETTINGS = ["logprobs", "echo"];
const WHY = {
  weights_version: "the weights are others",
  numerics: "it was computed otherwise",
  version: "the service is another version",
};

/** Parses a receipt that the user pasted, its seed a string of digits; throws an Error with a message if invalid. */
export function readReceipt(text) {
  let found;
  try {
    found = parseExact(text);
  } catch {
    throw new Error(`This is no JSON. ${EXPECTED}`);
  }
  const receipt = found?.receipt ?? found; // the user may paste a whole response
  if (receipt === null || typeof receipt !== "object" || Array.isArray(receipt)) throw new Error(EXPECTED);
  const { settings, seed } = receipt;
  const missing = ["weights_version", "seed", "settings"].filter((name) => receipt[name] === undefined);
  if (missing.length) throw new Error(`This receipt has no ${missing.join(" and no ")}. ${EXPECTED}`);
  if (!/^-?\d{1,19}$/.test(seed)) throw new Error("The seed of this receipt is no whole number.");
  if (settings?.constructor !== Object) throw new Error("The settings of this receipt are no object.");
  return { ...receipt, seed: String(seed) };
}

/** JSON text of a receipt whose seed is a string of digits, which becomes a number again. */
export function receiptJson(receipt) {
  const text = JSON.stringify({ ...receipt, seed: 0 }, null, 2);
  return text.replace(/^ {2}"seed": 0/m, () => `  "seed": ${receipt.seed}`); // nested ones have more indentation
}

/** { field: text } that repeats the receipt's request; `parameters` (request-parameters.js) have the kinds. */
export function typedOf(receipt, parameters) {
  const kinds = new Map(parameters.map(({ name, kind }) => [name, kind]));
  const settings = Object.entries(receipt.settings).filter(([name]) => !NOT_SETTINGS.includes(name));
  const typed = settings.map(([name, value]) => [name, isNothing(name, value) ? "" : typedAs(kinds.get(name), value)]);
  return { ...Object.fromEntries(typed.filter(([, text]) => text !== "")), seed: String(receipt.seed) };
}

function isNothing(name, value) {
  // An empty list counts as unset. An empty object does, too, except for json_schema, where it allows any JSON.
  return (Array.isArray(value) || name === "logit_bias") && isEmpty(value ?? {});
}

/** [[name, shown text, full text], ...] of a receipt. */
export function rowsOf({ settings = {}, seed, weights_version: weights, numerics, version, prompt_sha256: prompt }) {
  const short = (digest) => (typeof digest === "string" ? digest.replace(/^sha256:/, "").slice(0, 12) : "several");
  const shown = Object.entries(settings).filter(([, value]) => value !== null && !isEmpty(value));
  return [
    ["seed", String(seed), ""],
    ["weights", short(weights), weights],
    ["prompt", short(prompt), prompt],
    ["computed by", `${numerics}, version ${version}`, ""],
    ...shown.map(([name, value]) => [name, typeof value === "object" ? JSON.stringify(value) : String(value), ""]),
  ];
}

function isEmpty(value) {
  return typeof value === "object" && Object.keys(value).length === 0;
}

/** SHA-256 of a text as in receipts; null on pages without TLS, where browsers lack crypto.subtle. */
export async function digest(text) {
  if (!globalThis.crypto?.subtle) return null;
  const bytes = new Uint8Array(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text)));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** A sentence about a receipt whose settings were applied; `here`: { weights_version, numerics, prompt_sha256 }. */
export function taken(receipt, here) {
  const other = (name) => receipt[name] && here[name] && receipt[name] !== here[name];
  const { truncate_prompt_tokens: cut } = receipt.settings;
  const warnings = [
    other("prompt_sha256") && "It was made with another text than this one.",
    other("weights_version") && "The weights here are others: expect another text.",
    other("numerics") && `It was computed by ${receipt.numerics}, here it is ${here.numerics}: the text may differ.`,
    cut && `Its prompt was cut to the last ${cut} tokens, which the page does only where a text is too long.`,
  ];
  return ["The settings and the seed come from the receipt.", ...warnings.filter(Boolean)].join(" ");
}

/**
 * The result of a replay: { same, at, sentence }. `first` and `again`: { text, receipt }; `at`: where the texts first
 * differ (UTF-16 code units), or null.
 */
export function compared(first, again) {
  if (first.text === again.text) return verdict(true, null, `The same text, to the letter: ${counted(again.text)}.`);
  const at = parting(first.text, again.text);
  const [shorter, longer] = [first.text, again.text].sort((a, b) => a.length - b.length);
  if (at === shorter.length) {
    const who = shorter === first.text ? "the first run" : "the replay";
    return verdict(true, null, `The same text as far as ${who} went: ${counted(shorter)} of ${counted(longer, "")}.`);
  }
  const place = `Another text from character ${counted(first.text.slice(0, at), "", 1)} on`;
  const pieces = `\u201c${piece(first.text, at)}\u201d became \u201c${piece(again.text, at)}\u201d`;
  return verdict(false, at, `${place}: ${pieces}. ${reason(first.receipt, again.receipt)}`);
}

function verdict(same, at, sentence) {
  return { same, at, sentence };
}

function reason(first, again) {
  const reasons = Object.keys(WHY).filter((name) => first?.[name] !== again?.[name]);
  if (reasons.length) return `The reason may be that ${reasons.map((name) => WHY[name]).join(", and that ")}.`;
  return "Weights, build and number format are the same: the hardware may be another.";
}

// The first difference of two texts, never inside a character.
function parting(a, b) {
  let at = 0;
  while (at < a.length && at < b.length && a[at] === b[at]) at += 1;
  const isInside = at > 0 && /[\uD800-\uDBFF]/.test(a[at - 1]) && at < Math.max(a.length, b.length);
  return isInside ? at - 1 : at;
}

function piece(text, at) {
  return [...text.slice(at, at + 80)].slice(0, 20).join("").replace(/\s/g, " ");
}

function counted(text, unit = "characters", more = 0) {
  const count = [...text].length + more;
  return unit === "" ? String(count) : `${count} ${count === 1 ? unit.slice(0, -1) : unit}`;
}

/**
 * Replays a run with the settings and seed of its receipt, without changing the document, and returns compared() of both.
 * `run`: { prompt, text, index, typed, receipt }; for `complete(prompt, typed, signal)` and its errors see completion.js.
 */
export async function replay(run, { complete, parameters, signal }) {
  // Source and suffix are taken as typed, because a receipt has only their digests.
  const typed = { ...run.typed, ...typedOf(run.receipt, parameters) };
  let [text, receipt] = ["", null];
  for await (const { type, data } of complete(run.prompt, typed, signal)) {
    if (type === "token" && (data.index ?? 0) === run.index) text += data.text;
    if (type === "done") receipt = data.receipt;
  }
  return compared(run, { text: text.replace(/\r\n?/g, "\n"), receipt }); // line ends as in the document
}
