// A long paragraph that grows, in rows of a bounded length: a browser lays out a paragraph as a whole, and 2,000 tokens
// of one take it 10 ms. Where a line ends anyway, the next one may as well begin a row of its own. It does not look
// different, until the width changes: then unfold(). `split(token, at)` cuts an element in two.

const MOST = 200; // tokens in a row
const FOLD = "fold";

/** Moves the last line of a row that has grown long into a row of its own; returns the row to go on with. */
export function fold(row, split) {
  if (row.childElementCount < MOST) return row;
  const first = lastLine(row, split);
  if (!first) return row;
  const next = document.createElement(row.localName);
  next.className = FOLD;
  while (first.nextSibling) next.prepend(row.lastChild);
  next.prepend(first);
  row.after(next);
  return next;
}

/** Paragraphs in one row each, as they were. */
export function unfold(root) {
  for (const row of root.querySelectorAll(`.${FOLD}`)) {
    row.previousElementSibling.append(...row.childNodes);
    row.remove();
  }
}

// The element that begins the last line. A line is cut behind a blank, and most tokens begin with one: then the word
// stands on the new line, and its blank on the old one.
function lastLine(row, split) {
  let below = top(row.lastChild, row.lastChild.textContent.length - 1);
  for (let token = row.lastChild; token.previousSibling; token = token.previousSibling) {
    const word = token.textContent.search(/\S/);
    if (word > 0 && top(token, word) === below && top(token, 0) < below) return split(token, word);
    const before = token.previousSibling;
    if (top(token, 0) === below && top(before, before.textContent.length - 1) < below) return token;
    if (top(token, 0) < below) below = top(token, 0); // a word that is longer than a line: try the line above
  }
  return null;
}

// Of the line in which a character stands.
function top(token, at) {
  const range = document.createRange();
  range.setStart(token.firstChild, at);
  range.setEnd(token.firstChild, at + 1);
  return range.getBoundingClientRect().top;
}
