// One token as the server sends it, { id, text, bytes, logprob, top }: probability, surprise, rank, entropy of its
// position, and its spelling with visible whitespace. Pure functions.

const NBSP = "\u00a0";
/** Visible characters for whitespace. */
export const MARKS = { " ": "\u00b7", "\t": "\u2192", "\n": "\u21b5", "\r": "\u240d" };

/** Probability, 0 to 1; null for the first token of a text. */
export function probability({ logprob }) {
  return logprob === null ? null : Math.exp(logprob);
}

/** Surprise in bits; null for the first token of a text. */
export function surprise({ logprob }) {
  return logprob === null ? null : -logprob / Math.LN2 || 0; // never -0
}

/** Rank among the most likely tokens, from 1; null if it is not among those that the server sent. */
export function rank({ id, top = [] }) {
  const index = top.findIndex((other) => other.id === id);
  return index < 0 ? null : index + 1;
}

/** Total probability of all tokens that are not in `top`. */
export function restOf(top) {
  return Math.max(1 - top.reduce((sum, { logprob }) => sum + Math.exp(logprob), 0), 0);
}

/** Lower bound of the next token's entropy in bits: counts all tokens that the server did not send as one. */
export function entropy(top) {
  const shares = [...top.map(({ logprob }) => Math.exp(logprob)), restOf(top)];
  return shares.reduce((sum, share) => (share > 0 ? sum - share * Math.log2(share) : sum), 0);
}

/** Whether it is a special token, which controls a text without being part of it. */
export function isSilent({ bytes }) {
  return bytes.length === 0;
}

/** Whether its bytes are an incomplete character, with which no text can end. */
export function isPart({ bytes }) {
  try {
    new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(Uint8Array.from(bytes));
    return false;
  } catch {
    return true;
  }
}

/** [[kind, text]]: the token with all its characters visible. Kinds: text, blank, bytes, end. */
export function written(token) {
  if (isSilent(token)) return [["end", "end of text"]];
  if (isPart(token)) return [["bytes", token.bytes.map(hex).join(" ")]];
  return [...token.text.matchAll(/[ \t\n\r]+|[^ \t\n\r]+/g)].map(([piece]) =>
    piece[0] in MARKS ? ["blank", Array.from(piece, (blank) => MARKS[blank]).join("")] : ["text", piece],
  );
}

/** The token in words, for a screen reader. */
export function spoken(token) {
  if (isSilent(token)) return "end of text";
  if (isPart(token)) return `part of a character, ${token.bytes.map(hex).join(" ")}`;
  if (token.text.trim() !== "") return `'${token.text.trim()}'`;
  const names = { " ": "space", "\t": "tab", "\n": "line end", "\r": "carriage return" };
  return Array.from(token.text, (blank) => names[blank] ?? "blank").join(", ");
}

/** "12 %", with more digits for small shares. */
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
