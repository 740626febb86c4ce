// word-difference.js: word-by-word comparison of two texts.

import assert from "node:assert/strict";
import test from "node:test";

import { common, wordDifference } from "../../app/web/text/word-difference.js";

const joined = (pieces) => pieces.map(([, piece]) => piece).join("");
const different = (pieces) => pieces.filter(([isDifferent]) => isDifferent).map(([, piece]) => piece);

test("different words are marked in both texts, punctuation separately, and blanks only between marked words", () => {
  const { a, b, count } = wordDifference("The king had a cat.", "The old queen had a cat,");
  assert.deepEqual(different(a), ["king", "."]);
  assert.deepEqual(different(b), ["old queen", ","]);
  assert.equal(count, 2);
  assert.deepEqual(wordDifference("same", "same"), { a: [[false, "same"]], b: [[false, "same"]], count: 0 });
  assert.deepEqual(wordDifference("", "new"), { a: [], b: [[true, "new"]], count: 1 });
});

// Length of the longest common subsequence, by the quadratic table.
function longest(a, b) {
  const table = Array.from({ length: a.length + 1 }, () => new Array(b.length + 1).fill(0));
  for (let x = 1; x <= a.length; x += 1) {
    for (let y = 1; y <= b.length; y += 1) {
      table[x][y] = a[x - 1] === b[y - 1] ? table[x - 1][y - 1] + 1 : Math.max(table[x - 1][y], table[x][y - 1]);
    }
  }
  return table[a.length][b.length];
}

test("random texts keep a longest common subsequence, lose no letter, and have no islands", () => {
  let seed = 3;
  const below = (limit) => (seed = (seed * 1103515245 + 12345) % 2147483648) % limit;
  for (let round = 0; round < 200; round += 1) {
    const [one, other] = [0, 1].map(() => Array.from({ length: below(30) }, () => "abcd"[below(4)]));
    const pairs = common(one, other);
    assert.equal(pairs.length, longest(one, other), `round ${round}`);
    assert.ok(pairs.every(([x, y], index) => one[x] === other[y] && (index === 0 || (x > pairs[index - 1][0] && y > pairs[index - 1][1]))));
    const { a, b } = wordDifference(one.join(" "), other.join(" "));
    assert.deepEqual([a, b].map(joined), [one, other].map((words) => words.join(" ")));
  }
  assert.deepEqual(different(wordDifference("one two, three four", "five six, seven eight").a), ["one two, three four"]);
});

test("common words are marked too if more letters around them differ", () => {
  const spring = "go. So now we're setting up for this business and here's the spring. I won't get to work";
  const world = "go in the world is to keep the house for a while, as long as you can do it. If I were to put";
  const { a, b, count } = wordDifference(spring, world);
  assert.equal(count, 1);
  assert.deepEqual([different(a), different(b)], [[spring.slice(2)], [world.slice(3)]]);
  assert.deepEqual(different(wordDifference("the red cat sat", "the blue cat ran").a), ["red", "sat"]);
});

test("texts with nothing in common differ in one place", () => {
  const [a, b] = ["a", "b"].map((letter) => Array.from({ length: 4000 }, (_, index) => `${letter}${index}`).join(" "));
  assert.deepEqual(wordDifference(a, b), { a: [[true, a]], b: [[true, b]], count: 1 });
});
