// outline.js: a tree that has each range of text once, with siblings where texts diverge.

import assert from "node:assert/strict";
import test from "node:test";

import { outline, parting, unfolded, within } from "../../app/web/text/outline.js";
import { Tree } from "../../app/web/text/tree.js";

const state = (text) => ({ text, units: [] });
const text = (tree, { source, start, end }) => tree.node(source).state.text.slice(start, end);

/** The outline as lines, indented by level, with a star after the current entry. */
function lines(tree) {
  return outline(tree).map((entry) => `${" ".repeat(entry.level - 1)}${text(tree, entry)}${entry.current ? "*" : ""}`);
}

function grown() {
  const tree = new Tree(state("Once"));
  tree.commit("run", state("Once there was a king"), { at: 4, logprobs: { from: 4, lengths: [6, 4, 2, 5], values: [-1, -1, -1, -3] } });
  return tree;
}

test("typed steps between runs are skipped, and the current entry is where the text continues", () => {
  const tree = grown();
  tree.type(state("Once there was a king."), false);
  tree.commit("run", state("Once there was a king. And"), { at: 22, seed: "5" });
  assert.deepEqual(lines(tree), ["Once", "  there was a king", "  . And*"]);
  const [root, first, second] = outline(tree);
  assert.deepEqual([root, first, second].map(({ kind, number }) => [kind, number]), [["text", null], ["run", 1], ["run", 2]]);
  assert.equal(second.facts.seed, "5");
  assert.deepEqual([root, first, second].map(({ here }) => here), [true, true, true]);
  tree.undo();
  assert.deepEqual(outline(tree).map(({ current }) => current), [false, true, false], "a typed step counts as its run");
  assert.deepEqual(outline(tree).map(({ next }) => next), [first.key, second.key, null], "skips typed steps");
});

test("siblings diverge at the start of a word, and their common text occurs once", () => {
  const tree = grown();
  tree.commit("run", state("Once there was a knight"), { at: 23, logprobs: { from: 16, lengths: [7], values: [-2] } });
  assert.deepEqual(lines(tree), ["Once", "  there was a", "   king", "   knight*"]);
  const [, shared, king, knight] = outline(tree);
  assert.deepEqual([shared.kind, shared.id, shared.facts], ["parting", null, {}]);
  const near = (chances, first, mean) => {
    assert.ok(Math.abs(chances.first - Math.exp(first)) < 1e-9 && Math.abs(chances.mean - Math.exp(mean)) < 1e-9);
  };
  near(shared.chances, -1, -1);
  near(king.chances, -3, -3);
  near(knight.chances, -2, -2);
  assert.deepEqual([king.parent, knight.parent], [shared.key, shared.key]);
  assert.equal(tree.undo().state.text, "Once there was a king", "undo still goes back in time");
});

test("a replaced text is a separate branch, and a truncated one is not", () => {
  const tree = grown();
  tree.commit("text", state("Once there was"));
  assert.deepEqual(lines(tree), ["Once*", "  there was a king"]);
  tree.commit("text", state("Twice"));
  tree.commit("run", state("Twice upon"), { at: 5 });
  tree.go(0);
  assert.deepEqual(lines(tree), ["", " Once*", "   there was a king", " Twice", "   upon"]);
  assert.equal(outline(new Tree(state(""))).length, 1);
});

test("equal texts are one entry, and surrogate pairs are not split", () => {
  const tree = grown();
  tree.go(0);
  tree.commit("run", state("Once there was a king"), { at: 4 });
  assert.equal(outline(tree).length, 2);
  assert.equal(outline(tree)[1].id, 2, "the later node");
  assert.equal(parting("a \ud83d\ude00", "a \ud83d\ude01", 0), 1);
  assert.equal(parting("x".repeat(50) + "\ud83d\ude00", "x".repeat(50) + "\ud83d\ude01", 0), 50);
  assert.equal(parting("the cat", "the cats", 0), 7);
});

test("keys stay the same while the tree grows, and labels apply to their part of the text", () => {
  const tree = grown();
  const before = outline(tree).map(({ key }) => key);
  const { id } = tree.part(1, 16);
  tree.label(id, { name: "fork", isBookmarked: true, isCollapsed: true });
  const [root, fork, king] = outline(tree);
  assert.deepEqual([root.key, king.key], before);
  assert.deepEqual([fork.name, fork.isBookmarked, fork.isCollapsed, king.isCollapsed], ["fork", true, true, false]);
  assert.deepEqual(unfolded(outline(tree)).map(({ key }) => key), [root.key, fork.key]);
  assert.equal(fork.words, "there was a");
});

test("the words of an entry leave out the punctuation that ends the previous sentence", () => {
  const tree = new Tree(state("It rained"));
  tree.commit("run", state("It rained. So they stayed"), { at: 9 });
  assert.equal(outline(tree).at(-1).words, "So they stayed");
  tree.commit("run", state("It rained. So they stayed\u2026 .5 l"), { at: 25 });
  assert.equal(outline(tree).at(-1).words, "\u2026 .5 l");
});

test("within() returns every node whose text goes through an entry", () => {
  const tree = grown();
  tree.type(state("Once there was a king."), false);
  tree.commit("run", state("Once there was a king. And"), { at: 22 });
  tree.commit("run", state("Once there was a knight"), { at: 23, logprobs: { from: 16, lengths: [7], values: [-2] } });
  const entries = outline(tree);
  const ids = (words) => within(tree, entries.find((entry) => text(tree, entry) === words));
  assert.deepEqual(ids(" king"), [1, 2, 3]);
  assert.deepEqual(ids(" knight"), [4]);
  assert.deepEqual(ids(". And"), [2, 3]);
  assert.deepEqual(ids(" there was a"), [1, 2, 3, 4]);
});

test("in random trees the entries on the path to a run spell its text, and no two siblings start with the same word", () => {
  let seed = 11;
  const below = (limit) => (seed = (seed * 1103515245 + 12345) % 2147483648) % limit;
  for (let round = 0; round < 60; round += 1) {
    const tree = new Tree(state("a"));
    for (let size = 0; size < 30; size += 1) {
      tree.go(below(tree.nodes.length));
      const words = tree.current.state.text.split(" ").slice(0, 1 + below(8));
      const start = words.join(" ");
      tree.commit("run", state([start, ...Array.from({ length: 1 + below(4) }, () => "abc"[below(3)])].join(" ")), { at: start.length });
    }
    const entries = new Map(outline(tree).map((entry) => [entry.key, entry]));
    const whole = (entry) => (entry ? whole(entries.get(entry.parent)) + text(tree, entry) : "");
    const all = [...entries.values()];
    assert.deepEqual(new Set(all.filter(({ number }) => number).map(whole)), new Set(tree.nodes.slice(1).map(({ state }) => state.text)));
    for (const { key } of all) {
      const starts = all.filter(({ parent }) => parent === key).map((entry) => text(tree, entry).trim().split(" ")[0]);
      assert.equal(new Set(starts).size, starts.length, lines(tree).join("\n"));
    }
    assert.equal(all.filter(({ current }) => current).length, 1);
    assert.equal(whole(all.find(({ current }) => current)), tree.current.state.text);
  }
});
