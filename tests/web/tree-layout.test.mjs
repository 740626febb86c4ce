// The layout of the tree strip, on hand-made and random trees.
import assert from "node:assert/strict";
import { test } from "node:test";
import { inOrder, lay, neighbour } from "../../app/web/text/tree-layout.js";

/** Runs with these parents, by index; `current` is the last id of the current path. */
function tree(parents, current) {
  const runs = parents.map((parent, id) => ({ id, parent, next: null, here: false }));
  for (let id = current; id !== null; id = parents[id]) runs[id].here = true;
  return runs;
}

function randomTree(size, seed) {
  let state = seed;
  const below = (limit) => (state = (state * 1103515245 + 12345) % 2147483648) % limit;
  const parents = [null];
  // Half of the runs continue the newest one, as people write; the rest branch anywhere.
  while (parents.length < size) parents.push(below(2) ? parents.length - 1 : below(parents.length));
  return tree(parents, below(size));
}

const spots = ({ places }, ids) => ids.map((id) => [places.get(id).column, places.get(id).lane]);

test("a tree without branches takes one lane", () => {
  const strip = lay(tree([null, 0, 1, 2], 2));
  assert.deepEqual(spots(strip, [0, 1, 2, 3]), [[0, 0], [1, 0], [2, 0], [3, 0]]);
  assert.deepEqual([strip.columns, strip.lanes], [4, [0, 0]]);
});

test("siblings are in order of creation around the path", () => {
  const strip = lay(tree([null, 0, 0, 0], 2));
  assert.deepEqual(spots(strip, [1, 2, 3]), [[1, -1], [1, 0], [1, 1]]);
  assert.deepEqual(strip.lanes, [-1, 1]);
});

test("below the current run the last visited child goes straight, else the middle one", () => {
  const runs = tree([null, 0, 0, 0], 0);
  assert.deepEqual(spots(lay(runs), [1, 2, 3]), [[1, -1], [1, 0], [1, 1]]);
  runs[0].next = 3;
  assert.deepEqual(spots(lay(runs), [1, 2, 3]), [[1, -2], [1, -1], [1, 0]]);
});

test("a branch that has ended frees its lane for the next one", () => {
  // 0 - 1 - 2 - 3 is the path; 4 is a child of 0 and 5 of 2: both fit into lane 1.
  const strip = lay(tree([null, 0, 1, 2, 0, 2], 3));
  assert.deepEqual(spots(strip, [4, 5]), [[1, 1], [3, 1]]);
});

test("dots do not overlap, edges do not cross, and the path is straight", () => {
  for (let seed = 1; seed <= 100; seed += 1) {
    const runs = randomTree(2 + (seed % 40), seed);
    const strip = lay(runs);
    const occupied = [...strip.places.values()].map(({ column, lane }) => `${column} ${lane}`);
    assert.equal(new Set(occupied).size, runs.length, `two dots in one slot, seed ${seed}`);
    assert.equal(crossings(strip), 0, `seed ${seed}`);
    for (const { id } of runs.filter((run) => run.here)) assert.equal(strip.places.get(id).lane, 0);
    for (const { children } of strip.places.values()) {
      const lanes = children.map((id) => strip.places.get(id).lane);
      assert.deepEqual(lanes, [...lanes].sort((a, b) => a - b), "older siblings are above");
    }
  }
});

test("control: the check finds a crossing", () => {
  const strip = lay(tree([null, 0, 0, 1, 2], 1));
  assert.equal(crossings(strip), 0);
  strip.places.get(3).lane = 9;
  assert.equal(crossings(strip), 1);
});

// Edges between the same two columns cross if their ends are not in the order of their starts.
function crossings({ places, edges }) {
  let count = 0;
  const lines = edges.map(({ from, to }) => [places.get(from), places.get(to)]);
  for (const [a, b] of lines) {
    for (const [c, d] of lines) {
      if (a.column === c.column && a.lane < c.lane && b.lane >= d.lane) count += 1;
    }
  }
  return count;
}

test("arrow keys reach every dot, and up reverses down", () => {
  const { places } = lay(randomTree(60, 7));
  const reached = new Set([0]);
  for (const id of reached) {
    for (const key of ["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"]) {
      const other = neighbour(places, id, key);
      if (other !== null) reached.add(other);
    }
    const below = neighbour(places, id, "ArrowDown");
    if (below !== null) assert.equal(neighbour(places, below, "ArrowUp"), id);
  }
  assert.equal(reached.size, 60);
});

test("Home moves to the root, End to the end of the line, and other keys nowhere", () => {
  const { places } = lay(tree([null, 0, 1, 1, 3], 2));
  const reached = ["Home", "End", "ArrowDown", "ArrowUp", "x"].map((key) => neighbour(places, 2, key));
  assert.deepEqual(reached, [0, 2, 3, null, null]);
  assert.equal(neighbour(places, 3, "End"), 4);
});

test("reading order is depth first", () => {
  assert.deepEqual(inOrder(lay(tree([null, 0, 0, 1, 2, 1], 4)).places), [0, 1, 3, 5, 2, 4]);
});
