// The document as it stands: its text, and which stretches of it the model wrote ("units", one for each token that
// came). Pure. Offsets are in UTF-16 units, as everywhere in a browser.

const PIECE = 4096; // characters that are compared at once, a power of 16

export class Manuscript {
  #text; // up to where the model writes,
  #units;
  #rest = null; // and { text, units } behind that; null where it writes at the end
  #afterCR = false; // the last piece ended in CR: an LF that comes first now belongs to it

  /** `units`: [{ start, end, tokens }], in order, not overlapping; `tokens` is what the server told of them, or null. */
  constructor({ text = "", units = [] } = {}) {
    this.#text = text;
    this.#units = [...units];
  }

  get text() {
    return this.#rest ? this.#text + this.#rest.text : this.#text;
  }

  get units() {
    if (!this.#rest) return this.#units;
    const shift = this.#text.length;
    return [...this.#units, ...this.#rest.units.map(({ start, end }) => ({ start: start + shift, end: end + shift, tokens: null }))];
  }

  /** What a history may keep: it never changes again. */
  get state() {
    return { text: this.text, units: [...this.units] };
  }

  /** [[start, end]]: the stretches that the model wrote, neighbours joined. */
  get written() {
    return joined(this.units);
  }

  /** From now on the model's text stands in place of what is between `start` and `end`, until close(). What stands behind
      it moves along, without its details, which held for what stood before it. */
  open(start, end) {
    const text = this.#text.slice(end);
    const behind = this.#units.filter((unit) => unit.end > end);
    this.cut(start);
    this.#rest = { text, units: behind.map((unit) => ({ start: Math.max(unit.start - end, 0), end: unit.end - end })) };
  }

  /** The model has written: its text is cut at `end`, and `blank` is put behind it. Returns where that ends. */
  close(end, blank = "") {
    const rest = this.#rest;
    this.cut(end);
    this.#text += blank;
    this.#rest = rest;
    const until = this.#text.length;
    [this.#text, this.#units, this.#rest] = [this.text, this.units, null];
    return until;
  }

  /** Text from the model, where it writes; returns its unit. A textarea knows one line end, LF: so does the document. */
  append(text, tokens = null) {
    const piece = this.#afterCR && text[0] === "\n" ? text.slice(1) : text;
    if (text !== "") this.#afterCR = text.endsWith("\r");
    const unit = { start: this.#text.length, end: 0, tokens };
    this.#text += piece.replace(/\r\n?/g, "\n");
    unit.end = this.#text.length;
    this.#units.push(unit);
    return unit;
  }

  /** The user's hand: the whole text as it is now. What was touched is the user's; what stands behind it moves along,
      without its details, which held for what stood before it. */
  rewrite(text) {
    const { start, removed, added } = difference(this.#text, text);
    this.#rest = null;
    const end = start + removed;
    const shift = added - removed;
    const units = [];
    for (const unit of this.#units) {
      if (unit.end <= start) units.push(unit);
      else {
        if (unit.start < start) units.push({ start: unit.start, end: start, tokens: null });
        if (unit.end > end) units.push({ start: Math.max(unit.start, end) + shift, end: unit.end + shift, tokens: null });
      }
    }
    [this.#text, this.#units, this.#afterCR] = [text, units, false];
  }

  /** Everything from `at` on goes. */
  cut(at) {
    this.rewrite(this.#text.slice(0, at));
  }
}

/** [[start, end]] of units, neighbours joined. */
export function joined(units) {
  const stretches = [];
  for (const { start, end } of units) {
    const last = stretches.at(-1);
    if (last?.[1] === start) last[1] = end;
    else if (end > start) stretches.push([start, end]);
  }
  return stretches;
}

/** The one stretch in which two texts differ: `removed` characters of `before` at `start` became `added` of `after`. */
export function difference(before, after) {
  const shorter = Math.min(before.length, after.length);
  const start = shared(shorter, (from, to) => before.slice(from, to) === after.slice(from, to));
  const isSameTail = (from, to) => before.slice(before.length - to, before.length - from) === after.slice(after.length - to, after.length - from);
  const tail = shared(shorter - start, isSameTail);
  return { start, removed: before.length - tail - start, added: after.length - tail - start };
}

// How many characters from 0 on are the same, at most `limit`. Browsers compare pieces a hundred times as fast as characters.
function shared(limit, isSame) {
  let count = 0;
  for (let step = PIECE; step >= 1; step /= 16) {
    while (count + step <= limit && isSame(count, count + step)) count += step;
  }
  return count;
}
