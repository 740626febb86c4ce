// The document as it stands: its text, and which stretches of it the model wrote ("units", one for each token that
// came). Pure. Offsets are in UTF-16 units, as everywhere in a browser.

export class Manuscript {
  #text;
  #units;
  #afterCR = false; // the last piece ended in CR: an LF that comes first now belongs to it

  /** `units`: [{ start, end, tokens }], in order, not overlapping; `tokens` is what the server told of them, or null. */
  constructor({ text = "", units = [] } = {}) {
    this.#text = text;
    this.#units = [...units];
  }

  get text() {
    return this.#text;
  }

  get units() {
    return this.#units;
  }

  /** What a history may keep: it never changes again. */
  get state() {
    return { text: this.#text, units: [...this.#units] };
  }

  /** [[start, end]]: the stretches that the model wrote, neighbours joined. */
  get written() {
    const stretches = [];
    for (const { start, end } of this.#units) {
      const last = stretches.at(-1);
      if (last?.[1] === start) last[1] = end;
      else if (end > start) stretches.push([start, end]);
    }
    return stretches;
  }

  /** Text from the model, at the end; returns its unit. A textarea knows one line end, LF: so does the document. */
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

/** The one stretch in which two texts differ: `removed` characters of `before` at `start` became `added` of `after`. */
export function difference(before, after) {
  const shorter = Math.min(before.length, after.length);
  let start = 0;
  while (start < shorter && before[start] === after[start]) start++;
  let tail = 0;
  while (tail < shorter - start && before.at(-1 - tail) === after.at(-1 - tail)) tail++;
  return { start, removed: before.length - tail - start, added: after.length - tail - start };
}
