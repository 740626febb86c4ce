// Units of the document in which every token stands alone: { start, end, tokens }, with several tokens only where they
// share a character. Made of what the server streams (tokens with their bytes) or of what it measured afterwards
// (tokens with their places). Offsets in UTF-16 units, as everywhere in a browser.

const PLACES = 20; // the most alternatives that the server tells

/**
 * The units of a run, cut into one for each token. The server's `text` of a part of a character is U+FFFD, so text is
 * made of the bytes. A unit whose tokens do not tell its text has none: it comes back with `tokens` null.
 * `text` is the document's from `from` on.
 */
export function single(units, text, from = 0) {
  const textOf = ({ start, end }) => text.slice(start - from, end - from);
  return units.flatMap((unit) => (unit.tokens?.length ? cut(unit, textOf(unit)) : [unit]));
}

/** Units of tokens that a tokenizer placed: `places` holds { start, end } in code points of the text, one for each. */
export function placed(tokens, places, text) {
  const offsets = [0];
  for (const character of text) offsets.push(offsets.at(-1) + character.length);
  const units = [];
  tokens.forEach((token, index) => {
    const [start, end] = [offsets[places[index].start], offsets[places[index].end]];
    const last = units.at(-1);
    if (start === end) return; // a token that was added, which the text does not show
    if (last && start < last.end) {
      last.tokens.push(token);
      last.end = Math.max(last.end, end);
    } else units.push({ start, end, tokens: [token] });
  });
  return units;
}

/** Whether a unit says what its tokens were worth, and what could have stood there. */
export function isTold({ tokens }) {
  return tokens?.every(({ logprob, top }) => logprob === null || top?.length) ?? false;
}

/** [[start, end]]: where a text of this length has no such unit. */
export function gaps(units, length) {
  const holes = [];
  let at = 0;
  for (const { start, end } of units.filter(isTold)) {
    if (start > at) holes.push([at, start]);
    at = Math.max(at, end);
  }
  return at < length ? [...holes, [at, length]] : holes;
}

/** What of these units lies between `start` and `end`. Of one that is cut by the border, the part that is inside. */
export function within(units, [start, end]) {
  const inside = units.filter((unit) => unit.start < end && unit.end > start);
  return inside.map((unit) => ({ ...unit, start: Math.max(unit.start, start), end: Math.min(unit.end, end) }));
}

// A unit's text is that of its tokens, less what the server took away: a first space, or what stands behind a stop.
function cut({ start, end, tokens }, text) {
  const pieces = decoded(tokens);
  const first = pieces.map((piece) => piece.text).join("").indexOf(text);
  if (first < 0) return [{ start, end, tokens: null }];
  let at = start - first;
  const units = pieces.map((piece) => ({ start: at, end: (at += piece.text.length), tokens: piece.tokens }));
  return within(units, [start, end]);
}

// [{ text, tokens }]: tokens that only begin a character go with the one that ends it. Line ends as in the document.
function decoded(tokens) {
  const utf8 = new TextDecoder("utf-8", { ignoreBOM: true });
  const pieces = [];
  let waiting = [];
  let afterCR = false;
  const take = (raw) => {
    const text = (afterCR && raw[0] === "\n" ? raw.slice(1) : raw).replace(/\r\n?/g, "\n");
    afterCR = raw.endsWith("\r");
    if (text !== "") pieces.push({ text, tokens: waiting });
    waiting = [];
  };
  for (const token of tokens) {
    if (token.bytes.length === 0) continue;
    // Where this token does not go on with a character that was begun, that one is broken, and stands alone.
    if (waiting.length && !continues(token.bytes[0])) take(utf8.decode());
    waiting.push(token);
    const text = utf8.decode(Uint8Array.from(token.bytes), { stream: true });
    if (text !== "") take(text);
  }
  const tail = utf8.decode();
  if (waiting.length) take(tail);
  else if (tail !== "") pieces.at(-1).text += tail; // begun by a token that ended another character
  return pieces;
}

function continues(byte) {
  return byte >= 0x80 && byte < 0xc0;
}

/**
 * The tokens of the whole document: those that were streamed, and for all other text (the user's own words, what a reload
 * kept) the tokens as the model reads them, measured by the server.
 *
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
