// The history of the document, as a tree: undoing and going on another way grows a branch, and nothing is lost.
// Pure.

import { difference, Manuscript } from "./manuscript.js";

const MOST_NODES = 300;
const WORDS = 8;

export class Tree {
  #nodes = new Map(); // id -> node, in order of birth
  #patches = new WeakMap(); // state -> { before, patch }
  #current;
  #next = 0;

  /** `state` is what a Manuscript calls so: { text, units }. */
  constructor(state) {
    this.#current = this.#grow(null, "text", state, {});
  }

  /** { id, parent, kind, state, facts, latest }. `latest` is the child where redo() leads. */
  get current() {
    return this.#current;
  }

  node(id) {
    return this.#nodes.get(id);
  }

  children(id) {
    return [...this.#nodes.values()].filter(({ parent }) => parent === id);
  }

  /** A new child of the current node, not gone to. `kind`: "text" (typed or opened) or "run" (the model wrote it). */
  add(kind, state, facts = {}) {
    const node = this.#grow(this.#current.id, kind, state, facts);
    this.#prune();
    return node;
  }

  /** A new child of the current node, and the current one from now on. */
  commit(kind, state, facts = {}) {
    return this.go(this.add(kind, state, facts).id);
  }

  /** The user goes on typing: no step of its own, unless another branch begins at the state that would be lost. */
  type(state, joined) {
    const { kind, id, parent } = this.#current;
    const open = joined && kind === "text" && parent !== null && this.children(id).length === 0;
    if (open) this.#current.state = state;
    else this.commit("text", state);
  }

  go(id) {
    this.#current = this.#nodes.get(id);
    for (let node = this.#current; node.parent !== null; node = this.node(node.parent)) {
      this.node(node.parent).latest = node.id;
    }
    return this.#current;
  }

  get canUndo() {
    return this.#current.parent !== null;
  }

  get canRedo() {
    return this.node(this.#current.latest) !== undefined;
  }

  undo() {
    return this.canUndo ? this.go(this.#current.parent) : null;
  }

  redo() {
    return this.canRedo ? this.go(this.#current.latest) : null;
  }

  /** The nearest run at or above the current node, or null. */
  get lastRun() {
    let node = this.#current;
    while (node && node.kind !== "run") node = this.node(node.parent);
    return node ?? null;
  }

  /**
   * The runs and the root, as a reader sees them: a run hangs where its text parts from the others', so that one that
   * takes another token in the middle of a run is its sibling. [{ id, parent, next, words, facts, current, here }], `next`
   * being the run where redo() leads. (Undo follows time instead, and leads back to what was there before.)
   */
  runs() {
    const shown = (node) => node.kind === "run" || node.parent === null;
    const nearest = (node) => (!node || shown(node) ? node : nearest(this.node(node.parent)));
    const ahead = (node) => (!node || node.kind === "run" ? node : ahead(this.node(node.latest)));
    const above = (node) => nearest(this.node(node.parent));
    const fork = (node) => {
      let parent = above(node);
      while (parent && !node.state.text.startsWith(parent.state.text)) parent = above(parent);
      return parent ?? above(node);
    };
    const runs = [...this.#nodes.values()].filter(shown);
    const parents = new Map(runs.map((node) => [node, fork(node)]));
    const current = nearest(this.#current);
    const here = new Set();
    for (let node = current; node; node = parents.get(node)) here.add(node);
    return runs.map((node) => ({
      id: node.id,
      parent: parents.get(node)?.id ?? null,
      next: ahead(this.node(node.latest))?.id ?? null,
      words: this.#words(node),
      facts: node.facts,
      current: node === current,
      here: here.has(node),
    }));
  }

  /** Plain data for storage: each text as its difference from its parent's, without the details of tokens (they are
      many, and can be had again). */
  get data() {
    const nodes = [...this.#nodes.values()].map(({ state, ...node }) => ({ ...node, ...this.#patch(node.parent, state) }));
    return { nodes, current: this.#current.id };
  }

  /** The tree that `data` was taken of; throws where it is none. */
  static from({ nodes, current }) {
    const tree = new Tree({ text: "", units: [] });
    tree.#nodes.clear();
    for (const { start, removed, text, written, ...node } of nodes) {
      if (node.parent !== null && !tree.node(node.parent)) throw new Error("a node has no parent");
      if (typeof text !== "string" || node.facts?.constructor !== Object) throw new Error("a node is none of a tree");
      const before = tree.node(node.parent)?.state.text ?? "";
      const state = { text: before.slice(0, start) + text + before.slice(start + removed), units: [] };
      state.units = written.map(([start, end]) => ({ start, end, tokens: null }));
      tree.#nodes.set(node.id, { ...node, state });
    }
    tree.#next = Math.max(...tree.#nodes.keys()) + 1;
    tree.#current = tree.#nodes.get(current);
    if (!tree.#current) throw new Error("there is no node to go on from");
    return tree;
  }

  // A state never changes: its difference from the same parent is looked for once, however often it is stored.
  #patch(parent, state) {
    const before = this.node(parent)?.state ?? null;
    const known = this.#patches.get(state);
    if (known?.before === before) return known.patch;
    const { start, removed, added } = difference(before?.text ?? "", state.text);
    const patch = { start, removed, text: state.text.slice(start, start + added), written: new Manuscript(state).written };
    this.#patches.set(state, { before, patch });
    return patch;
  }

  #grow(parent, kind, state, facts) {
    const node = { id: this.#next++, parent, kind, state, facts, latest: null };
    this.#nodes.set(node.id, node);
    return node;
  }

  #path(node) {
    const path = [];
    for (; node; node = this.node(node.parent)) path.push(node);
    return path;
  }

  // The first words that the step before did not have, whole ones where it changed the middle of a word.
  #words(node) {
    const before = this.node(node.parent)?.state.text ?? "";
    const { text } = node.state;
    let { start } = difference(before, text);
    if (start < before.length) while (start > 0 && /\S/.test(text[start - 1])) start--;
    const words = text.slice(start).trim().split(/\s+/);
    return words.slice(0, WORDS).join(" ") + (words.length > WORDS ? " \u2026" : "");
  }

  // The oldest end that one is not on goes first, where there is but one line its beginning; the ways on from here last,
  // since one of them is about to be chosen.
  #prune() {
    while (this.#nodes.size > MOST_NODES) {
      const parents = new Set([...this.#nodes.values()].map(({ parent }) => parent));
      const path = this.#path(this.#current);
      const nodes = [...this.#nodes.values()].slice(0, -1); // not the one that was just born
      const ends = nodes.filter((node) => !parents.has(node.id) && !path.includes(node));
      const end = ends.find(({ parent }) => parent !== this.#current.id);
      if (end || path.length === 1) this.#nodes.delete((end ?? ends[0]).id);
      else this.#cutRoot();
    }
  }

  #cutRoot() {
    const root = this.#nodes.values().next().value;
    this.#nodes.delete(root.id);
    for (const node of this.#nodes.values()) if (node.parent === root.id) node.parent = null;
  }
}
