// tree.js: navigation loses no state, until there are too many nodes.

import assert from "node:assert/strict";
import test from "node:test";

import { Tree } from "../../app/web/text/tree.js";

const state = (text, written = []) => ({ text, units: written.map(([start, end]) => ({ start, end, tokens: null })) });

function grown() {
  const tree = new Tree(state("Once"));
  tree.commit("run", state("Once upon a time there was a king who had a cat", [[4, 47]]));
  return tree;
}

test("undo and redo follow one line, and redo returns to the branch that was undone", () => {
  const tree = grown();
  const first = tree.current.id;
  tree.undo();
  assert.equal(tree.current.state.text, "Once");
  assert.equal(tree.undo(), null);
  const second = tree.commit("run", state("Once more", [[4, 9]])).id;
  tree.undo();
  assert.equal(tree.redo().id, second);
  tree.go(first);
  tree.undo();
  assert.equal(tree.redo().id, first);
  assert.equal(tree.redo(), null);
  assert.deepEqual(tree.children(0).map(({ id }) => id), [first, second]);
});

test("joined typing is one step, and never overwrites a state with children", () => {
  const tree = new Tree(state("a"));
  tree.type(state("ab"), false);
  tree.type(state("abc"), true);
  assert.equal(tree.undo().state.text, "a");
  tree.redo();
  tree.commit("run", state("abc def", [[3, 7]]));
  tree.undo();
  tree.type(state("abX"), true);
  assert.equal(tree.undo().state.text, "abc", "the state before the run is kept");
  tree.undo();
  tree.type(state("z"), true);
  assert.equal(tree.undo().state.text, "a", "the root is kept");
});

test("drafts are children that are not current", () => {
  const tree = new Tree(state("a"));
  const nodes = ["b", "c"].map((text) => tree.add("run", state(text)));
  assert.equal(tree.current.state.text, "a");
  assert.equal(tree.go(nodes[1].id).state.text, "c");
  assert.equal(tree.lastRun, nodes[1]);
});

test("a stored tree is restored, except for token details", () => {
  const tree = grown();
  tree.undo();
  tree.commit("text", state("Twice"));
  tree.commit("run", state("Twice upon", [[5, 7], [7, 10]]), { seed: "1" });
  tree.label(tree.current.id, { name: "second", isBookmarked: true, isCollapsed: true });
  const again = Tree.from(JSON.parse(JSON.stringify(tree.data)));
  assert.deepEqual(again.data, tree.data);
  assert.equal(again.current.state.text, "Twice upon");
  assert.deepEqual(again.current.state.units, [{ start: 5, end: 10, tokens: null }]);
  assert.equal(again.commit("run", state("x")).id, tree.commit("run", state("x")).id, "new nodes get new numbers");
  const broken = (change) => ({ ...tree.data, nodes: tree.data.nodes.map((node, at) => (at ? { ...node, ...change } : node)) });
  const wrongs = [{ parent: 99 }, { text: 5 }, { facts: undefined }, { facts: { logprobs: 1 } }, { name: 5 }].map(broken);
  for (const wrong of [...wrongs, {}, { nodes: [], current: 0 }, { ...tree.data, current: 99 }]) assert.throws(() => Tree.from(wrong));
});

test("all drafts can be taken, also when one line fills the tree", () => {
  const tree = new Tree(state("0"));
  for (let i = 1; i < 1000; i++) tree.commit("text", state(String(i)));
  const drafts = ["a", "b", "c"].map((text) => tree.add("run", state(text)));
  for (const { id, state } of drafts) {
    assert.equal(tree.go(id).state.text, state.text);
    tree.undo();
  }
  while (tree.canUndo) tree.undo();
  for (let i = 0; i < 1100; i++) tree.add("run", state(`way ${i}`));
  assert.equal(tree.data.nodes.length, 1000);
  assert.equal(Tree.from(tree.data).current.id, tree.current.id, "the current node is kept if it is the root");
});

test("a full tree drops the oldest leaves, but neither the current line nor a parent", () => {
  const tree = new Tree(state("0"));
  const kept = tree.add("run", state("kept")).id;
  tree.label(kept, { isBookmarked: true });
  for (let i = 1; i <= 1100; i++) {
    tree.add("run", state(`side ${i}`));
    tree.commit("run", state(String(i)));
  }
  const { nodes } = tree.data;
  assert.equal(nodes.length, 1000);
  assert.equal(tree.current.state.text, "1100");
  assert.equal(tree.node(kept).state.text, "kept", "bookmarked nodes outlive others");
  const ids = new Set(nodes.map(({ id }) => id));
  assert.equal(nodes.filter(({ parent }) => parent === null || !ids.has(parent)).length, 1, "one root");
  let steps = 0;
  while (tree.undo()) steps++;
  assert.ok(steps >= 990, "the current line outlives its side branches");
  Tree.from(tree.data);
});

test("removing a label restores the data without it", () => {
  const tree = grown();
  const { data } = tree;
  tree.label(1, { name: "a", isCollapsed: true });
  assert.notDeepEqual(tree.data, data);
  tree.label(1, { name: "", isCollapsed: false });
  assert.deepEqual(tree.data, data);
});

test("removing nodes leaves a valid tree, even without the root, and restore() undoes it", () => {
  for (const ids of [[1], [0], [0, 1], [3]]) {
    const tree = grown();
    tree.commit("run", state("Once upon a time there was a knight"));
    tree.commit("text", state("Twice"));
    tree.go(2);
    const { data } = tree;
    const removed = tree.remove(ids);
    assert.deepEqual(Tree.from(tree.data).data, tree.data);
    assert.deepEqual(tree.nodes.map(({ id }) => id), [0, 1, 2, 3].filter((id) => !ids.includes(id)));
    assert.equal(tree.nodes.filter(({ parent }) => parent === null).length, 1);
    tree.restore(removed);
    assert.deepEqual(tree.data, data);
  }
  assert.throws(() => grown().remove([1]), /current/);
});

test("part() returns an existing node or adds one that keeps the authorship of its text", () => {
  const tree = grown();
  assert.equal(tree.part(1, 4).id, 0);
  const { id, parent, state: part } = tree.part(1, 9);
  assert.deepEqual([id, parent, part.text, tree.current.id], [2, 0, "Once upon", 1]);
  assert.deepEqual(part.units.map(({ start, end }) => [start, end]), [[4, 9]]);
  assert.equal(tree.part(1, 9).id, id);
});
