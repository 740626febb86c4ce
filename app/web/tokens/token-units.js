// Units of the document, { start, end, tokens }: one token each, or several that share a character. They come from the
// stream (tokens with their bytes) or from a later measurement (tokens with their offsets). Offsets are in UTF-16 code
// units, as in all browser APIs.

const ALTERNATIVES = 20; // the most that the server sends for a token

/**
 * Splits the units of a run into one for each token. Decodes the tokens' bytes, since the server's `text` of an
 * incomplete character is U+FFFD. A unit whose tokens do not yield its text is returned whole, with `tokens` null.
 * `text` is the document's text from offset `from` on.
 */
export function single(units, text, from = 0) {
  const textOf = ({ start, end }) => text.slice(start - from, end - from);
  return units.flatMap((unit) => (unit.tokens?.length ? cut(unit, textOf(unit)) : [unit]));
}

/** Units of tokens with known offsets: `places` has { start, end } in code points of the text for each token. */
export function placed(tokens, places, text) {
  const offsets = [0];
  for (const character of text) offsets.push(offsets.at(-1) + character.length);
  const units = [];
  tokens.forEach((token, index) => {
    const [start, end] = [offsets[places[index].start], offsets[places[index].end]];
    const last = units.at(-1);
    if (start === end) return; // a special token, which is not part of the text
    if (last && start < last.end) {
      last.tokens.push(token);
      last.end = Math.max(last.end, end);
    } else units.push({ start, end, tokens: [token] });
  });
  return units;
}

/** Whether the logprobs and alternatives of a unit's tokens are known. */
export function isMeasured({ tokens }) {
  return tokens?.every(({ logprob, top }) => logprob === null || top?.length) ?? false;
}

/** [[start, end]]: the parts of a text of this length that no measured unit covers. */
export function gaps(units, length) {
  const holes = [];
  let at = 0;
  for (const { start, end } of units.filter(isMeasured)) {
    if (start > at) holes.push([at, start]);
    at = Math.max(at, end);
  }
  return at < length ? [...holes, [at, length]] : holes;
}

/** The units between `start` and `end`; those that cross a border are clipped. */
export function within(units, [start, end]) {
  const inside = units.filter((unit) => unit.start < end && unit.end > start);
  return inside.map((unit) => ({ ...unit, start: Math.max(unit.start, start), end: Math.min(unit.end, end) }));
}

// A unit's text is its tokens' text without what the server removed: a leading space, or everything from a stop string on.
function cut({ start, end, tokens }, text) {
  if (tokens.length === 1 && tokens[0].text === text && !text.includes("\ufffd")) return [{ start, end, tokens }];
  const pieces = decoded(tokens);
  const first = pieces.map((piece) => piece.text).join("").indexOf(text);
  if (first < 0) return [{ start, end, tokens: null }];
  let at = start - first;
  const units = pieces.map((piece) => ({ start: at, end: (at += piece.text.length), tokens: piece.tokens }));
  return within(units, [start, end]);
}

// [{ text, tokens }]: tokens that begin a character are joined with the one that completes it. Line ends are LF.
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
    // This token does not continue the character that was begun, which is therefore broken, and a piece of its own.
    if (waiting.length && !continues(token.bytes[0])) take(utf8.decode());
    waiting.push(token);
    const text = utf8.decode(Uint8Array.from(token.bytes), { stream: true });
    if (text !== "") take(text);
  }
  const tail = utf8.decode();
  if (waiting.length) take(tail);
  else if (tail !== "") pieces.at(-1).text += tail; // begun by a token that also completed another character
  return pieces;
}

function continues(byte) {
  return byte >= 0x80 && byte < 0xc0;
}

/**
 * The tokens of the whole document: those that were streamed, and for all other text (typed by the user, or restored
 * after a reload) the tokens as the model reads them, scored by the server.
 *
 * { units, unread }: units that cover the text except its first `unread` tokens, which exceed the model's context.
 *
 * `tokenize(text, signal)` and `score(ids, logprobs, signal)` are POST /tokenize and POST /score as JSON. They are not
 * called if nothing is missing. Throws what they throw.
 */
export async function fill(text, units, { tokenize, score, signal }) {
  const known = single(units, text).filter(isMeasured);
  const holes = gaps(known, text.length);
  if (holes.length === 0) return { units: known, unread: 0 };
  const { tokens: ids, pieces: places, max_model_len: most } = await tokenize(text, signal);
  const first = Math.max(ids.length - most, 0);
  const { scores } = await score(ids.slice(first), ALTERNATIVES, signal);
  const measured = placed(scores[0].tokens, places.slice(first), text);
  const added = holes.flatMap((hole) => within(measured, hole));
  const all = [...known, ...added].sort((a, b) => a.start - b.start);
  return { units: all, unread: first };
}
