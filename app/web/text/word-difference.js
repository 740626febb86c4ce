// Word difference of two texts (Myers, "An O(ND) Difference Algorithm", 1986). Pure functions.

const WORD = /(\s*)([\p{L}\p{N}\p{M}]+(?:['\u2019-][\p{L}\p{N}\p{M}]+)*|[^\s]|$)/gu; // a word or sign, with the whitespace before it
const MOST_CHANGES = 1500; // beyond that texts have little in common, and the search takes seconds

/** { a, b, count }: each text as [[isDifferent, piece], ...], and the number of places in which they differ. */
export function wordDifference(a, b) {
  const [before, after] = [a, b].map((text) => [...text.matchAll(WORD)].filter(([all]) => all !== ""));
  const words = [before, after].map((matches) => matches.map(([, , word]) => word));
  const pairs = withoutIslands(common(...words), ...words);
  const [x, y] = [before, after].map((words, side) => mark(words, new Set(pairs.map((pair) => pair[side]))));
  return { a: x, b: y, count: stretches(pairs, before.length, after.length) };
}

// Joins consecutive differing words, and the whitespace between them, into one piece.
function mark(words, same) {
  const pieces = [];
  const put = (isDifferent, piece) => {
    if (piece === "") return;
    if (pieces.at(-1)?.[0] === isDifferent) pieces.at(-1)[1] += piece;
    else pieces.push([isDifferent, piece]);
  };
  words.forEach(([, blank, word], index) => {
    const isDifferent = !same.has(index);
    put(isDifferent && index > 0 && !same.has(index - 1), blank);
    put(isDifferent, word);
  });
  return pieces;
}

function stretches(pairs, lengthOfA, lengthOfB) {
  const edges = [[-1, -1], ...pairs, [lengthOfA, lengthOfB]];
  return edges.slice(1).filter(([x, y], index) => x > edges[index][0] + 1 || y > edges[index][1] + 1).length;
}

// Drops short matches between longer differences, which would only make the comparison harder to read.
function withoutIslands(pairs, a, b) {
  const [lettersOfA, lettersOfB] = [a, b].map(lettersBefore);
  const size = (run) => lettersOfA[run.at(-1)[0] + 1] - lettersOfA[run[0][0]];
  const gap = ([fromX, fromY], [toX, toY]) => {
    return Math.max(lettersOfA[toX] - lettersOfA[fromX + 1], lettersOfB[toY] - lettersOfB[fromY + 1]);
  };
  const runs = [];
  for (const pair of pairs) {
    const [x, y] = runs.at(-1)?.at(-1) ?? [];
    if (pair[0] === x + 1 && pair[1] === y + 1) runs.at(-1).push(pair);
    else runs.push([pair]);
  }
  let end = [-1, -1];
  const kept = runs.filter((run, index) => {
    const next = runs[index + 1]?.[0] ?? [a.length, b.length];
    const isIsland = size(run) < gap(end, run[0]) && size(run) < gap(run.at(-1), next);
    if (!isIsland) end = run.at(-1);
    return !isIsland;
  });
  return kept.flat();
}

// Prefix sums of the words' lengths.
function lettersBefore(words) {
  const sums = [0];
  for (const word of words) sums.push(sums.at(-1) + word.length);
  return sums;
}

/** [[index in a, index in b]]: a longest common subsequence of two lists. */
export function common(a, b) {
  let start = 0;
  while (start < a.length && start < b.length && a[start] === b[start]) start += 1;
  let tail = 0;
  while (tail < Math.min(a.length, b.length) - start && a.at(-1 - tail) === b.at(-1 - tail)) tail += 1;
  const middle = search(a.slice(start, a.length - tail), b.slice(start, b.length - tail));
  const head = Array.from({ length: start }, (_, index) => [index, index]);
  const end = Array.from({ length: tail }, (_, index) => [a.length - tail + index, b.length - tail + index]);
  return [...head, ...middle.map(([x, y]) => [x + start, y + start]), ...end];
}

// `furthest[k]` is the furthest index in a that a path with this number of changes reaches on diagonal k (x - y).
function search(a, b) {
  const most = Math.min(a.length + b.length, MOST_CHANGES);
  const furthest = new Int32Array(2 * most + 3);
  const at = (k) => k + most + 1;
  const steps = [];
  for (let changes = 0; changes <= most; changes += 1) {
    steps.push(furthest.slice(at(-changes - 1), at(changes + 1) + 1));
    for (let k = -changes; k <= changes; k += 2) {
      const isDown = k === -changes || (k !== changes && furthest[at(k - 1)] < furthest[at(k + 1)]);
      let x = isDown ? furthest[at(k + 1)] : furthest[at(k - 1)] + 1;
      while (x < a.length && x - k < b.length && a[x] === b[x - k]) x += 1;
      furthest[at(k)] = x;
      if (x >= a.length && x - k >= b.length) return back(steps, a.length, b.length);
    }
  }
  return [];
}

function back(steps, lengthOfA, lengthOfB) {
  const pairs = [];
  let [x, y] = [lengthOfA, lengthOfB];
  for (let changes = steps.length - 1; changes >= 0; changes -= 1) {
    const k = x - y;
    const furthest = (diagonal) => steps[changes][diagonal + changes + 1];
    const isDown = k === -changes || (k !== changes && furthest(k - 1) < furthest(k + 1));
    const from = changes === 0 ? 0 : isDown ? furthest(k + 1) : furthest(k - 1) + 1;
    while (x > from && y > 0) pairs.push([(x -= 1), (y -= 1)]);
    if (changes > 0) [x, y] = isDown ? [x, x - k - 1] : [x - 1, y];
  }
  return pairs.reverse();
}
