// Text that was written without knowing what stands behind it, made to fit in there. Pure.

import { wholeSentences } from "./sentences.js";

const SENTENCE_END = /[.!?\u2026\u3002]["'\u201d\u2019)\]]*$/;

/** { length, blank }: how much of `written` stays in place of `replaced`, and what parts it from `behind`. Where the user's
    words were whole sentences, so are the model's, if there are any. */
export function fit(written, replaced, behind) {
  const sentences = SENTENCE_END.test(replaced) ? wholeSentences(written) : 0;
  const length = sentences || written.length;
  const isJoined = /\S$/u.test(written.slice(0, length)) && /^[\p{L}\p{N}"'(\u201c\u2018]/u.test(behind);
  return { length, blank: isJoined ? " " : "" };
}

/** The span that is rewritten where this is selected: whole words with the blank before them, as a model writes them. */
export function rewritten(text, { start, end }) {
  const selected = text.slice(start, end);
  const last = start + selected.trimEnd().length;
  const first = start + selected.length - selected.trimStart().length;
  const withBlank = text[first - 1] === " " ? first - 1 : first;
  return { start: withBlank, end: last };
}
