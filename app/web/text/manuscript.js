// The document: its text, and the stretches of it that the model wrote ("units", one for each token). Offsets are in
// UTF-16 code units, as in all browser APIs. Pure: no DOM.

const PIECE = 4096; // characters compared at once, a power of 16

export class Manuscript {
  #text; // up to the position where the model writes
  #units;
  #rest = null; // { text, units } after that position; null if the model writes at the end
  #afterCR = false; // the last piece ended in CR, so a leading LF belongs to the same line end

  /** `units`: [{ start, end, tokens }], in order, not overlapping; `tokens` as the server sent them, or null. */
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

  /** An immutable copy, for the history. */
  get state() {
    return { text: this.text, units: [...this.units] };
  }

  /** [[start, end]]: the stretches that the model wrote, adjacent ones joined. */
  get written() {
    return joined(this.units);
  }

  /** Until close(), the model's text replaces what is between `start` and `end`. Units after it move along and lose their
      token details, which depended on the text before them. */
  open(start, end) {
    const text = this.#text.slice(end);
    const behind = this.#units.filter((unit) => unit.end > end);
    this.cut(start);
    this.#rest = { text, units: behind.map((unit) => ({ start: Math.max(unit.start - end, 0), end: unit.end - end })) };
  }

  /** Ends the model's text: cuts it at `end` and appends `blank`. Returns the offset after that. */
  close(end, blank = "") {
    const rest = this.#rest;
    this.cut(end);
    this.#text += blank;
    this.#rest = rest;
    const until = this.#text.length;
    [this.#text, this.#units, this.#rest] = [this.text, this.units, null];
    return until;
  }

  /** Appends text from the model at its position; returns its unit. Line ends become LF, as in a textarea. */
  append(text, tokens = null) {
    const piece = this.#afterCR && text[0] === "\n" ? text.slice(1) : text;
    if (text !== "") this.#afterCR = text.endsWith("\r");
    const unit = { start: this.#text.length, end: 0, tokens };
    this.#text += piece.replace(/\r\n?/g, "\n");
    unit.end = this.#text.length;
    this.#units.push(unit);
    return unit;
  }

  /** Replaces the text by what the user made of it. The changed part becomes the user's; units after it move along and
      lose their token details, which depended on the text before them. */
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

  /** Deletes everything from `at` on. */
  cut(at) {
    this.rewrite(this.#text.slice(0, at));
  }
}

/** [[start, end]] of units, adjacent ones joined. */
export function joined(units) {
  const stretches = [];
  for (const { start, end } of units) {
    const last = stretches.at(-1);
    if (last?.[1] === start) last[1] = end;
    else if (end > start) stretches.push([start, end]);
  }
  return stretches;
}

/** The stretch in which two texts differ: `removed` characters of `before` at `start` became `added` of `after`. */
export function difference(before, after) {
  const shorter = Math.min(before.length, after.length);
  const start = shared(shorter, (from, to) => before.slice(from, to) === after.slice(from, to));
  const isSameTail = (from, to) => before.slice(before.length - to, before.length - from) === after.slice(after.length - to, after.length - from);
  const tail = shared(shorter - start, isSameTail);
  return { start, removed: before.length - tail - start, added: after.length - tail - start };
}

// The number of equal characters from 0 on, at most `limit`. Browsers compare slices a hundred times as fast as characters.
function shared(limit, isSame) {
  let count = 0;
  for (let step = PIECE; step >= 1; step /= 16) {
    while (count + step <= limit && isSame(count, count + step)) count += step;
  }
  return count;
}
