// The tokens of the whole document: those that were streamed, and for all other text (the user's own words, what a
// reload kept) the tokens as the model reads them, measured by the server.

import { gaps, isTold, placed, single, within } from "./units.js";

const PLACES = 20; // the most alternatives that the server tells

/**
 * { units, unread }: units that cover the text, but for that of its first `unread` tokens, which the context of the
 * model has no room for.
 *
 * `tokenize(text, signal)` and `score(ids, logprobs, signal)` are POST /tokenize and POST /score as JSON. Neither is
 * asked where nothing is missing. Throws what they throw.
 */
export async function fill(text, units, { tokenize, score, signal }) {
  const told = single(units, text).filter(isTold);
  const holes = gaps(told, text.length);
  if (holes.length === 0) return { units: told, unread: 0 };
  const { tokens: ids, pieces: places, max_model_len: most } = await tokenize(text, signal);
  const first = Math.max(ids.length - most, 0);
  const { scores } = await score(ids.slice(first), PLACES, signal);
  const measured = placed(scores[0].tokens, places.slice(first), text);
  const added = holes.flatMap((hole) => within(measured, hole));
  const all = [...told, ...added].sort((a, b) => a.start - b.start);
  return { units: all, unread: first };
}
