// Incremental sentence splitter for English: text chunks in, whole sentences out. If in doubt it waits, since listeners
// understand a sentence that is too long better than one that is cut. Pure functions.

// A mark, then the quotes and brackets that close with it. A blank line ends a sentence too (a heading, a verse).
const END = /[.!?\u2026]+["'\u201d\u2019\u00bb)\]*_]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u201d]*|(?=\n[ \t\r]*\n)/gu;
// Abbreviations whose period ends no sentence, even before a capital letter.
const TITLES = "Mr|Mrs|Ms|Messrs|Mme|Mlle|Dr|Prof|St|Rev|Hon|Gen|Col|Capt|Lt|Sgt|Jr|Sr|Mt";
const WORDS = "vs|viz|cf|ca|etc|al|e\\.g|i\\.e|a\\.m|p\\.m";
const SHORT = new RegExp(`(?<![\\p{L}.])(?:${TITLES}|${WORDS})\\.$`, "u");
const NUMBERED = /(?<!\p{L})(?:No|Nos|Vol|Fig|Ch|pp?)\.$/u; // before a number: "No. 7", but "No. I won't."
const INITIAL = /(?<!\p{L})(?!I)\p{Lu}\.$/u; // "U.S.", "J. R. R.", but "So did I."
const CLOSED = /[.!?\u2026\u3002]["'\u201d\u2019)\]]*\s*$/; // the end of a finished text
const SENTENCE_END = /[.!?\u2026\u3002]["'\u201d\u2019)\]]*$/;
const WORD_SEGMENTER = Intl.Segmenter && new Intl.Segmenter(undefined, { granularity: "word" }); // in Firefox since 125
const REACH = 200; // characters on each side of an offset that are searched for its word
const LONGEST = 400; // characters of a piece of text without sentences, such as code or a list

export class Sentences {
  #text = "";

  /** Takes the next chunk of text; returns the sentences that are complete. */
  feed(text) {
    this.#text += text;
    const whole = [];
    for (let end = nextPiece(this.#text); end > 0; end = nextPiece(this.#text)) {
      whole.push(this.#text.slice(0, end));
      this.#text = this.#text.slice(end);
    }
    return whole.map(plain).filter((sentence) => sentence !== "");
  }

  /** Ends the text; returns the rest as the last sentence. */
  flush() {
    const rest = plain(this.#text);
    this.#text = "";
    return rest === "" ? [] : [rest];
  }
}

/** The last sentence of a text, or as much of it as fits into `longest` characters, cut between words. */
export function lastSentence(text, longest = 240) {
  let rest = text.slice(-4 * longest).trim();
  for (let end = nextEnd(rest); end > 0; end = nextEnd(rest)) rest = rest.slice(end);
  rest = rest.trim();
  if (rest.length <= longest) return rest;
  return `\u2026${rest.slice(rest.length - longest).replace(/^\S*\s/, " ")}`;
}

/** The length of the complete sentences of a finished text. */
function wholeSentences(text) {
  if (CLOSED.test(text)) return text.trimEnd().length;
  let length = 0;
  for (let end = nextEnd(text); end > 0; end = nextEnd(text.slice(length))) length += end;
  return text.slice(0, length).trimEnd().length;
}

// The end of the first sentence of the text, or 0 if none has certainly ended.
function nextEnd(text) {
  for (const { 0: mark, index } of text.matchAll(END)) {
    const end = index + mark.length;
    if (end > 0 && ends(text, end, mark)) return end;
  }
  return 0;
}

function nextPiece(text) {
  const end = nextEnd(text);
  if ((end > 0 && end <= LONGEST) || text.length <= LONGEST) return end;
  const space = text.lastIndexOf(" ", LONGEST);
  return space > 0 ? space : LONGEST;
}

function ends(text, end, mark) {
  if (mark === "" || /[\u3002\uff01\uff1f]/u.test(mark)) return true;
  const before = text.slice(Math.max(0, end - 12), end);
  if (SHORT.test(before) || INITIAL.test(before)) return false;
  const blank = text.slice(end).match(/^\s+/u)[0];
  if (/\n[ \t\r]*\n/.test(blank)) return true;
  const next = text.slice(end + blank.length).match(/^["'\u201c\u2018\u00ab([*_-]*(.)/u)?.[1];
  if (NUMBERED.test(before) && /^\d/.test(next ?? "")) return false;
  // '"Stop!" he said.': a lower-case letter continues the sentence. Without a next letter, wait.
  return next !== undefined && !/[\p{Ll},;:]/u.test(next);
}

const plain = (text) => text.replace(/\s+/gu, " ").trim();

/**
 * How to insert generated text before `behind`, which the model did not read: { length, blank }, the length of `written`
 * that replaces `replaced`, and the whitespace after it. If `replaced` was whole sentences, cuts `written` to whole ones.
 */
export function fit(written, replaced, behind) {
  const sentences = SENTENCE_END.test(replaced) ? wholeSentences(written) : 0;
  const length = sentences || written.length;
  const isJoined = /\S$/u.test(written.slice(0, length)) && /^[\p{L}\p{N}"'(\u201c\u2018]/u.test(behind);
  return { length, blank: isJoined ? " " : "" };
}

/**
 * The span to rewrite for a selection: whole words (Unicode Standard Annex 29, and the browser's dictionaries for scripts
 * without spaces) with the space before them, as tokens have it.
 */
export function rewritten(text, { start, end }) {
  const selected = text.slice(start, end);
  const first = wordAround(text, start + selected.length - selected.trimStart().length).start;
  const last = wordAround(text, start + selected.trimEnd().length).end;
  return { start: text[first - 1] === " " ? first - 1 : first, end: last };
}

// The word around an offset, or the offset itself if it is between words. Segments only REACH characters on each side: a
// line may have a million, and this runs at each change of the selection.
function wordAround(text, at) {
  if (!WORD_SEGMENTER) return { start: at, end: at };
  const from = Math.max(at - REACH, text.lastIndexOf("\n", at - 1) + 1, 0);
  const { index = 0, segment = "" } = WORD_SEGMENTER.segment(text.slice(from, at + REACH)).containing(at - from) ?? {};
  const start = from + index;
  return start < at && segment !== "" ? { start, end: start + segment.length } : { start: at, end: at };
}
