// The document's history as a tree: writing on after an undo grows a new branch, and no text is lost. Pure: no DOM.

import { difference, joined, Manuscript } from "./manuscript.js";

const MOST_NODES = 1000;

export class Tree {
  #nodes = new Map(); // id -> node, oldest first
  #patches = new WeakMap(); // state -> { before, patch }
  #current;
  #next = 0;

  /** `state`: of a Manuscript, { text, units }. */
  constructor(state) {
    this.#current = this.#grow(null, "text", state, {});
  }

  /** { id, parent, kind, state, facts, latest }. `latest` is the child that redo() goes to. See label() for the user's
      own labels. */
  get current() {
    return this.#current;
  }

  /** All nodes, oldest first. */
  get nodes() {
    return [...this.#nodes.values()];
  }

  node(id) {
    return this.#nodes.get(id);
  }

  children(id) {
    return [...this.#nodes.values()].filter(({ parent }) => parent === id);
  }

  /** Adds a child of the current node without going to it. `kind`: "text" (typed or opened) or "run" (generated). */
  add(kind, state, facts = {}) {
    const node = this.#grow(this.#current.id, kind, state, facts);
    this.#prune();
    return node;
  }

  /** Adds a child of the current node and goes to it. */
  commit(kind, state, facts = {}) {
    return this.go(this.add(kind, state, facts).id);
  }

  /** Typed text. `joined`: updates the current node instead of adding one, unless another branch begins there. */
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

  /** Sets a node's labels, { name, isBookmarked, isCollapsed }; leaves those alone that `labels` does not have. */
  label(id, labels) {
    const node = Object.assign(this.node(id), labels);
    for (const [name, value] of Object.entries(labels)) if (!value) delete node[name];
  }

  /** The node with the text of node `id` up to `end`: an existing one, or a new one, without going to it. */
  part(id, end) {
    const source = this.node(id);
    const text = source.state.text.slice(0, end);
    const known = this.nodes.findLast(({ state }) => state.text === text);
    if (known) return known;
    const manuscript = new Manuscript(source.state);
    manuscript.cut(end);
    return this.#grow(source.parent ?? source.id, "text", manuscript.state, {});
  }

  /** Removes these nodes, but never the current one, and attaches their children to the nearest remaining
      ancestor. Returns the argument of restore(). */
  remove(ids) {
    const gone = new Set(ids);
    if (gone.has(this.#current.id)) throw new Error("the current node cannot be removed");
    const above = (id) => (gone.has(id) ? above(this.node(id).parent) : id);
    const moved = this.nodes.filter((node) => !gone.has(node.id) && gone.has(node.parent));
    const before = moved.map((node) => [node, node.parent]);
    for (const node of moved) node.parent = above(node.parent);
    const removed = this.nodes.filter(({ id }) => gone.has(id));
    for (const { id } of removed) this.#nodes.delete(id);
    this.#joinRoots();
    return { removed, before };
  }

  /** Undoes a remove(), whatever changed since. */
  restore({ removed, before }) {
    const all = [...this.#nodes.values(), ...removed].sort((a, b) => a.id - b.id);
    this.#nodes = new Map(all.map((node) => [node.id, node]));
    for (const [node, parent] of before) if (this.#nodes.has(node.id)) node.parent = parent;
    this.#joinRoots();
  }

  /** Plain data for storage: each text as its difference from its parent's, without token details, which are large and
      can be requested again. */
  get data() {
    const nodes = [...this.#nodes.values()].map(({ state, ...node }) => ({ ...node, ...this.#patch(node.parent, state) }));
    return { nodes, current: this.#current.id };
  }

  /** The tree that `data` describes. Throws if it describes none. */
  static from({ nodes, current }) {
    const tree = new Tree({ text: "", units: [] });
    tree.#nodes.clear();
    for (const { start, removed, text, written, ...node } of nodes) {
      if (node.parent !== null && !tree.node(node.parent)) throw new Error("a node has no parent");
      if (typeof text !== "string" || !isNode(node)) throw new Error("a node is none of a tree");
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

  // States are immutable, so the difference from the same parent is computed once, however often it is stored.
  #patch(parent, state) {
    const before = this.node(parent)?.state ?? null;
    const known = this.#patches.get(state);
    if (known?.before === before) return known.patch;
    const { start, removed, added } = difference(before?.text ?? "", state.text);
    const patch = { start, removed, text: state.text.slice(start, start + added), written: joined(state.units) };
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

  // There is one root: the oldest node without a parent.
  #joinRoots() {
    const [root, ...others] = this.nodes.filter(({ parent }) => !this.#nodes.has(parent));
    root.parent = null;
    for (const node of others) node.parent = root.id;
  }

  // Removes the oldest leaf off the current path, or the oldest ancestor if there is only one path. Children of the
  // current node go last, since the user may be about to choose one. Named and bookmarked nodes stay.
  #prune() {
    while (this.#nodes.size > MOST_NODES) {
      const parents = new Set(this.nodes.map(({ parent }) => parent));
      const path = new Set(this.#path(this.#current));
      const others = this.nodes.slice(0, -1).filter((node) => node !== this.#current); // nor the newest
      const plain = others.filter(({ name, isBookmarked }) => !name && !isBookmarked);
      const ends = plain.filter((node) => !parents.has(node.id) && !path.has(node));
      const end = ends.find(({ parent }) => parent !== this.#current.id) ?? (path.size === 1 ? ends[0] : plain[0]);
      this.remove([(end ?? others[0]).id]);
    }
  }
}

function isNode({ facts, name = "" }) {
  const isObject = facts?.constructor === Object && typeof name === "string";
  const { lengths, values } = (isObject && facts.logprobs) ?? { lengths: [], values: [] };
  return isObject && Array.isArray(lengths) && Array.isArray(values);
}
