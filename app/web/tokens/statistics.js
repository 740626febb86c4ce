// Statistics of a text's tokens: a table with one line for each token, its CSV form, and the values of two curves.
// Pure functions.

import { entropy, isSilent, probability, rank, surprise } from "./token.js";
import { single } from "./token-units.js";

const COLUMNS = ["start", "end", "author", "id", "token", "probability", "logprob", "surprise_bits", "rank", "entropy_bits", "ms"];

/**
 * One entry for each token whose probability is known, in order: { start, end, isWritten, token, ms }. `written` is
 * [[start, end]] of what the model wrote; `arrival(token)`: ms since the previous token, or undefined.
 */
export function tokenTable(text, units, written, arrival = () => undefined) {
  const isWritten = ({ start }) => written.some(([from, to]) => start >= from && start < to);
  const known = single(units, text).filter((unit) => unit.tokens);
  return known.flatMap((unit) =>
    unit.tokens
      .filter((token) => !isSilent(token))
      .map((token) => ({ start: unit.start, end: unit.end, isWritten: isWritten(unit), token, ms: arrival(token) })),
  );
}

/** The table as CSV (RFC 4180). A token's text is a JSON string, so that whitespace is visible and no spreadsheet takes it for a formula. */
export function csv(table) {
  const lines = table.map(({ start, end, isWritten, token, ms }) => {
    const top = token.top ?? [];
    const known = token.logprob !== null;
    return [
      start,
      end,
      isWritten ? "model" : "user",
      token.id,
      JSON.stringify(token.text),
      known ? probability(token) : "",
      known ? token.logprob : "",
      known ? surprise(token) : "",
      known && top.length ? (rank(token) ?? "") : "",
      known && top.length ? entropy(top) : "",
      ms === undefined ? "" : ms.toFixed(1),
    ];
  });
  return [COLUMNS, ...lines].map((line) => `${line.map(cell).join(",")}\r\n`).join("");
}

/** The means of at most `most` bins of equal size; unknown values (null) are ignored. */
export function binned(values, most) {
  const count = Math.min(most, values.length);
  return Array.from({ length: count }, (_, index) => {
    const [from, to] = [index, index + 1].map((bin) => Math.floor((bin * values.length) / count));
    const known = values.slice(from, to).filter((value) => value !== null);
    return known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : null;
  });
}

/** Tokens per second at each token, over the last `span` tokens; null where an arrival is unknown. */
export function rates(table, span = 8) {
  return table.map((_, index) => {
    const times = table.slice(Math.max(0, index - span + 1), index + 1).map(({ ms }) => ms);
    const sum = times.reduce((total, ms) => total + (ms ?? NaN), 0);
    return times.length === span && sum > 0 ? (1000 * span) / sum : null;
  });
}

function cell(value) {
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}
