// Incremental sentence splitter: text chunks in, whole sentences out. Pure. English rules; it waits if in doubt, since
// a sentence that is too long is still understood, and one that is cut is not.

// A mark, then the quotes and brackets that close with it. A blank line ends a sentence too (a heading, a verse).
const END = /[.!?\u2026]+["'\u201d\u2019\u00bb)\]*_]*(?=\s)|[\u3002\uff01\uff1f]+[\u300d\u201d]*|(?=\n[ \t\r]*\n)/gu;
// Written with a point that ends nothing, even before a capital.
const TITLES = "Mr|Mrs|Ms|Messrs|Mme|Mlle|Dr|Prof|St|Rev|Hon|Gen|Col|Capt|Lt|Sgt|Jr|Sr|Mt";
const WORDS = "vs|viz|cf|ca|etc|al|e\\.g|i\\.e|a\\.m|p\\.m";
const SHORT = new RegExp(`(?<![\\p{L}.])(?:${TITLES}|${WORDS})\\.$`, "u");
const NUMBERED = /(?<!\p{L})(?:No|Nos|Vol|Fig|Ch|pp?)\.$/u; // before a number: "No. 7", but "No. I won't."
const INITIAL = /(?<!\p{L})(?!I)\p{Lu}\.$/u; // "U.S.", "J. R. R.", but "So did I."
const CLOSED = /[.!?\u2026\u3002]["'\u201d\u2019)\]]*\s*$/; // the end of a text that is over
const SENTENCE_END = /[.!?\u2026\u3002]["'\u201d\u2019)\]]*$/;
const WORD_SEGMENTER = Intl.Segmenter && new Intl.Segmenter(undefined, { granularity: "word" }); // Firefox has it since 125
const REACH = 200; // characters around a place in which the word it is inside of is looked for
const LONGEST = 400; // characters: code and lists have no sentences, and are read in pieces

export class Sentences {
  #text = "";

  /** Takes the next bit of text; gives the sentences that are whole by now. */
  feed(text) {
    this.#text += text;
    const whole = [];
    for (let end = nextPiece(this.#text); end > 0; end = nextPiece(this.#text)) {
      whole.push(this.#text.slice(0, end));
      this.#text = this.#text.slice(end);
    }
    return whole.map(plain).filter((sentence) => sentence !== "");
  }

  /** What has no end yet, as it is: the text is over. */
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

/** The length of the sentences that are whole: up to the last end that can be told, or all where it ends with one. */
function wholeSentences(text) {
  if (CLOSED.test(text)) return text.trimEnd().length;
  let length = 0;
  for (let end = nextEnd(text); end > 0; end = nextEnd(text.slice(length))) length += end;
  return text.slice(0, length).trimEnd().length;
}

// The index behind the first sentence of the text, or 0 where none can be told to have ended yet.
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
  // '"Stop!" he said.' goes on: what follows in a small letter is the same sentence. Nothing there yet: wait.
  return next !== undefined && !/[\p{Ll},;:]/u.test(next);
}

const plain = (text) => text.replace(/\s+/gu, " ").trim();

/** How text that was written without knowing what stands behind it is made to fit in there: { length, blank }: how much of `written` stays in place of `replaced`, and what parts it from `behind`. Where the user's
    words were whole sentences, so are the model's, if there are any. */
export function fit(written, replaced, behind) {
  const sentences = SENTENCE_END.test(replaced) ? wholeSentences(written) : 0;
  const length = sentences || written.length;
  const isJoined = /\S$/u.test(written.slice(0, length)) && /^[\p{L}\p{N}"'(\u201c\u2018]/u.test(behind);
  return { length, blank: isJoined ? " " : "" };
}

/** The span that is rewritten where this is selected: whole words (Unicode Standard Annex 29, and the browser's dictionaries
    where a script has no blanks) with the blank before them, as a model writes them. */
export function rewritten(text, { start, end }) {
  const selected = text.slice(start, end);
  const first = wordAround(text, start + selected.length - selected.trimStart().length).start;
  const last = wordAround(text, start + selected.trimEnd().length).end;
  return { start: text[first - 1] === " " ? first - 1 : first, end: last };
}

// The word that this place is inside of, or the place itself where it is between words. It segments no more than REACH
// characters on each side: a line may have a million, and this runs whenever the selection changes.
function wordAround(text, at) {
  if (!WORD_SEGMENTER) return { start: at, end: at };
  const from = Math.max(at - REACH, text.lastIndexOf("\n", at - 1) + 1, 0);
  const { index = 0, segment = "" } = WORD_SEGMENTER.segment(text.slice(from, at + REACH)).containing(at - from) ?? {};
  const start = from + index;
  return start < at && segment !== "" ? { start, end: start + segment.length } : { start: at, end: at };
}
