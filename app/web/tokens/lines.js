// Positions of tokens in lines as laid out by the browser. `beside(element, step)` returns the previous (-1) or next
// (1) token, or null.

/** The element in the line above (-1) or below (1) that is nearest to `x`, or null where there is no such line. */
export function nextLine(token, step, x, beside) {
  const from = topOf(token);
  let line = null;
  let best = null;
  for (let one = beside(token, step); one; one = beside(one, step)) {
    const top = topOf(one);
    if (isSame(top, from)) continue;
    line ??= top;
    if (!isSame(top, line)) break;
    if (best === null || distance(one, x) < distance(best, x)) best = one;
  }
  return best;
}

/** The first (-1) or last (1) element of the line. */
export function lineEnd(token, step, beside) {
  const from = topOf(token);
  let last = token;
  for (let one = beside(token, step); one && isSame(topOf(one), from); one = beside(one, step)) last = one;
  return last;
}

/** Where a token stands from left to right. */
export function middle(token) {
  const { left, right } = first(token);
  return (left + right) / 2;
}

// Of the line in which most of it stands: a word that begins a line has its blank at the end of the line before.
function first(token) {
  const rects = [...token.getClientRects()];
  return rects.reduce((widest, rect) => (rect.width > widest.width ? rect : widest), rects[0] ?? new DOMRect());
}

function topOf(token) {
  return first(token).top;
}

function distance(token, x) {
  const { left, right } = first(token);
  return Math.max(left - x, x - right, 0);
}

function isSame(top, other) {
  return Math.abs(top - other) < 2; // px: lines are further apart
}
