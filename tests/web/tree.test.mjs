// tree.js: nothing that was once there is lost by going another way, until there are too many.

import assert from "node:assert/strict";
import test from "node:test";

import { Tree } from "../../app/web/text/tree.js";

const state = (text, written = []) => ({ text, units: written.map(([start, end]) => ({ start, end, tokens: null })) });

function grown() {
  const tree = new Tree(state("Once"));
  tree.commit("run", state("Once upon a time there was a king who had a cat", [[4, 47]]));
  return tree;
}

test("undo and redo walk one line, and redo takes the branch one came from", () => {
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

test("typing is one step for as long as it is joined, and never overwrites a state with a branch behind it", () => {
  const tree = new Tree(state("a"));
  tree.type(state("ab"), false);
  tree.type(state("abc"), true);
  assert.equal(tree.undo().state.text, "a");
  tree.redo();
  tree.commit("run", state("abc def", [[3, 7]]));
  tree.undo();
  tree.type(state("abX"), true);
  assert.equal(tree.undo().state.text, "abc", "the run's beginning is still there");
  tree.undo();
  tree.type(state("z"), true);
  assert.equal(tree.undo().state.text, "a", "and so is the root");
});

test("the runs are what a reader sees: typed steps are passed over", () => {
  const tree = grown();
  tree.type(state("Once upon a time there was a king who had a cat."), false);
  tree.commit("run", state("Once upon a time there was a king who had a cat. And", [[48, 52]]), { seed: "5" });
  const [root, first, second] = tree.runs();
  assert.deepEqual([root.parent, first.parent, second.parent], [null, root.id, first.id]);
  assert.equal(first.words, "upon a time there was a king who \u2026");
  assert.equal(second.words, "And");
  assert.equal(second.facts.seed, "5");
  assert.deepEqual([root, first, second].map(({ here }) => here), [true, true, true]);
  assert.deepEqual([root, first, second].map(({ current }) => current), [false, false, true]);
  tree.undo();
  assert.deepEqual(tree.runs().map(({ current }) => current), [false, true, false], "a typed step counts as its run");
  assert.deepEqual(tree.runs().map(({ next }) => next), [first.id, second.id, null], "over what was typed between");
});

test("drafts are children that are not current", () => {
  const tree = new Tree(state("a"));
  const nodes = ["b", "c"].map((text) => tree.add("run", state(text)));
  assert.equal(tree.current.state.text, "a");
  assert.equal(tree.go(nodes[1].id).state.text, "c");
  assert.equal(tree.lastRun, nodes[1]);
});

test("what is stored is read again as it was, details of tokens apart", () => {
  const tree = grown();
  tree.undo();
  tree.commit("text", state("Twice"));
  tree.commit("run", state("Twice upon", [[5, 7], [7, 10]]), { seed: "1" });
  const again = Tree.from(JSON.parse(JSON.stringify(tree.data)));
  assert.deepEqual(again.data, tree.data);
  assert.equal(again.current.state.text, "Twice upon");
  assert.deepEqual(again.current.state.units, [{ start: 5, end: 10, tokens: null }]);
  assert.equal(again.commit("run", state("x")).id, tree.commit("run", state("x")).id, "new nodes get new numbers");
  const broken = (change) => ({ ...tree.data, nodes: tree.data.nodes.map((node, at) => (at ? { ...node, ...change } : node)) });
  const wrongs = [{ parent: 99 }, { text: 5 }, { facts: undefined }].map(broken);
  for (const wrong of [...wrongs, {}, { nodes: [], current: 0 }, { ...tree.data, current: 99 }]) assert.throws(() => Tree.from(wrong));
});

test("drafts are all there to be taken, also where the tree is full of one line", () => {
  const tree = new Tree(state("0"));
  for (let i = 1; i < 300; i++) tree.commit("text", state(String(i)));
  const drafts = ["a", "b", "c"].map((text) => tree.add("run", state(text)));
  for (const { id, state } of drafts) {
    assert.equal(tree.go(id).state.text, state.text);
    tree.undo();
  }
  while (tree.canUndo) tree.undo();
  for (let i = 0; i < 400; i++) tree.add("run", state(`way ${i}`));
  assert.equal(tree.data.nodes.length, 300);
  assert.equal(Tree.from(tree.data).current.id, tree.current.id, "one that stands on the root keeps it");
});

test("too many nodes: the oldest ends go, never what one stands on, and every parent is there", () => {
  const tree = new Tree(state("0"));
  for (let i = 1; i <= 400; i++) {
    tree.add("run", state(`side ${i}`));
    tree.commit("run", state(String(i)));
  }
  const { nodes } = tree.data;
  assert.equal(nodes.length, 300);
  assert.equal(tree.current.state.text, "400");
  const ids = new Set(nodes.map(({ id }) => id));
  assert.equal(nodes.filter(({ parent }) => parent === null || !ids.has(parent)).length, 1, "one root");
  let steps = 0;
  while (tree.undo()) steps++;
  assert.ok(steps >= 290, "the line that one stands on outlives its side branches");
  Tree.from(tree.data);
});

test("a run that takes another token in the middle of a run is drawn as its sibling; undo still follows time", () => {
  const tree = grown();
  const first = tree.current.id;
  const other = tree.commit("run", state("Once upon a time there was a knight", [[4, 35]])).id;
  const [root, , second] = tree.runs();
  assert.deepEqual([second.id, second.parent, second.words], [other, root.id, "knight"]);
  assert.deepEqual(tree.runs().map(({ here }) => here), [true, false, true]);
  assert.equal(tree.undo().id, first);
  tree.redo();
  tree.commit("run", state("Twice", []));
  assert.equal(tree.runs().at(-1).parent, other, "a text that begins like none of them stays where it came from");
});
