// One token as the server tells of it, { id, text, bytes, logprob, top }, and what a reader wants to know: how likely
// it was, which place it had, how open the place was, and how it is written where blanks must be seen.
// Pure.

const NBSP = "\u00a0";
/** What is drawn in the place of a blank. */
export const MARKS = { " ": "\u00b7", "\t": "\u2192", "\n": "\u21b5", "\r": "\u240d" };

/** How likely it was, 0 to 1; null where nothing stood before it. */
export function probability({ logprob }) {
  return logprob === null ? null : Math.exp(logprob);
}

/** Its surprise in bits: how many yes-or-no answers it was worth. */
export function surprise({ logprob }) {
  return logprob === null ? null : -logprob / Math.LN2 || 0; // never -0
}

/** Its place among the most likely ones, from 1; null where it is beyond those that were told. */
export function rank({ id, top = [] }) {
  const place = top.findIndex((other) => other.id === id);
  return place < 0 ? null : place + 1;
}

/** What all tokens beside the most likely ones have together. */
export function restOf(top) {
  return Math.max(1 - top.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0), 0);
}

/** Entropy of the next token in bits, with all that was not told counted as one token: the true one is not lower. */
export function entropy(top) {
  const shares = [...top.map(({ logprob }) => Math.exp(logprob)), restOf(top)];
  return shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log2(share) : sum), 0);
}

/** A special token, which ends or steers a text and is none of it. */
export function isSilent({ bytes }) {
  return bytes.length === 0;
}

/** Only a part of a character: no text can end in it. */
export function isPart({ bytes }) {
  try {
    new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
    return false;
  } catch {
    return true;
  }
}

/** [[kind, text]]: a token written so that everything in it is seen. Kinds: text, blank, bytes, end. */
export function written(token) {
  if (isSilent(token)) return [["end", "end of text"]];
  if (isPart(token)) return [["bytes", token.bytes.map(hex).join(" ")]];
  return [...token.text.matchAll(/[ \t\n\r]+|[^ \t\n\r]+/g)].map(([piece]) =>
    piece[0] in MARKS ? ["blank", Array.from(piece, (blank) => MARKS[blank]).join("")] : ["text", piece],
  );
}

/** The same for the ear. */
export function spoken(token) {
  if (isSilent(token)) return "end of text";
  if (isPart(token)) return `part of a character, ${token.bytes.map(hex).join(" ")}`;
  if (token.text.trim() !== "") return `'${token.text.trim()}'`;
  const names = { " ": "space", "\t": "tab", "\n": "line end", "\r": "carriage return" };
  return Array.from(token.text, (blank) => names[blank] ?? "blank").join(", ");
}

/** "12 %"; as many digits as it takes to tell it from nothing. */
export function percent(share) {
  const value = share * 100;
  if (value >= 9.95 || value === 0) return Math.round(value) + NBSP + "%";
  if (value >= 0.095) return value.toFixed(1) + NBSP + "%";
  return value >= 0.0095 ? value.toFixed(2) + NBSP + "%" : "<" + NBSP + "0.01" + NBSP + "%";
}

/** "5.1 bits". */
export function bits(value) {
  return value.toFixed(1) + NBSP + "bits";
}

function hex(byte) {
  return byte.toString(16).toUpperCase().padStart(2, "0");
}
