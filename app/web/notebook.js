// The document's operations: generate, stop, undo, redo, regenerate, pick another token, take a branch. Holds the text and
// its history, runs one request at a time, and notifies its view of changes.

import { difference, Manuscript } from "./text/manuscript.js";
import { fit } from "./text/sentences.js";
import { Tree } from "./text/tree.js";

const MOST_CHOICES = 16; // the server's limit for n
const PAUSE = 1500; // ms without typing that end an undo step
const SENTENCE_END = /[.!?\u2026\u3002]["'\u201d\u2019)\]]*\s$|\n$/; // also ends an undo step

export class Notebook {
  #complete;
  #view;
  #tree;
  #manuscript;
  #run = null; // the current run: { abort, before, drafts, facts, picked, span }
  #typedAt = -Infinity; // time of the last typed text; -Infinity: the next one begins an undo step

  /**
   * `complete(prompt, typed, signal, origins)`: see request/completion.js; `typed` and `origins` are lists for
   * concurrently(). `view` receives events: changed(), of the text; labeled(), of names, bookmarks or collapsed branches;
   * began(count, typed, names, span), with lists for a comparison of presets; received(type, data), a server event;
   * wrote(index, unit, text); and ended({ error, stopped, nodes }), with the tree's node of each continuation, null for
   * an empty one.
   */
  constructor(complete, view, tree = new Tree({ text: "", units: [] })) {
    [this.#complete, this.#view, this.#tree] = [complete, view, tree];
    this.#manuscript = new Manuscript(tree.current.state);
  }

  get tree() {
    return this.#tree;
  }

  get text() {
    return this.#manuscript.text;
  }

  get units() {
    return this.#manuscript.units;
  }

  get written() {
    return this.#manuscript.written;
  }

  get running() {
    return this.#run !== null;
  }

  get canUndo() {
    return !this.running && this.#tree.canUndo;
  }

  get canRedo() {
    return !this.running && this.#tree.canRedo;
  }

  get canRegenerate() {
    return !this.running && (this.#tree.lastRun?.parent ?? null) !== null; // where it began may be forgotten
  }

  /** The user changed the text. `isStep`: at one go, such as by pasting; else by a key, which may join the keys before. */
  type(text, isStep = false) {
    const now = performance.now();
    const { start, added } = difference(this.text, text);
    this.#manuscript.rewrite(text);
    this.#tree.type(this.#manuscript.state, !isStep && now - this.#typedAt < PAUSE);
    const isEnd = isStep || (added > 0 && SENTENCE_END.test(text.slice(0, start + added)));
    this.#typedAt = isEnd ? -Infinity : now;
  }

  /** Another text altogether, as a step that can be undone. */
  open(text) {
    if (this.running) return;
    this.#manuscript.rewrite(text);
    this.#typedAt = -Infinity;
    this.#tree.commit("text", this.#manuscript.state);
    this.#view.changed();
  }

  /** Another document: its history in place of this one. */
  load(tree) {
    if (this.running) return;
    this.#tree = tree;
    this.#show(tree.current);
  }

  undo() {
    if (this.canUndo) this.#show(this.#tree.undo());
  }

  redo() {
    if (this.canRedo) this.#show(this.#tree.redo());
  }

  /** To another node of the tree. */
  go(id) {
    if (!this.running) this.#show(this.#tree.go(id));
  }

  /** To the text of an entry (outline.js), which may have no node yet. */
  visit({ id, source, end }) {
    if (!this.running) this.go(id ?? this.#tree.part(source, end).id);
  }

  /** Gives an entry a name, a bookmark or a fold: see Tree.label(). */
  label({ id, source, end }, labels) {
    this.#tree.label(id ?? this.#tree.part(source, end).id, labels);
    this.#view.labeled();
  }

  /** Deletes these nodes; if the text is one of them, the entry `instead` takes its place. Returns what restores
      them, and the text, unless another one has been gone to. */
  remove(ids, instead) {
    const tree = this.#tree;
    const before = tree.current;
    if (ids.includes(before.id)) this.visit(instead);
    const after = tree.current;
    const removed = tree.remove(ids);
    this.#view.changed();
    return () => {
      tree.restore(removed);
      if (tree.current === after) this.go(before.id);
      else this.#view.changed();
    };
  }

  /** Continues the text. `typed`: request fields as the user typed them; n above 1 writes n concurrent drafts. `span`:
      { start, end, isInfill }, which the text replaces, with the text after it as the suffix if `isInfill`; null: writes
      at the end. */
  generate(typed, span = null) {
    return this.#start(typed, { span });
  }

  /** As generate(), once for each of these settings, side by side: [{ name, typed, origin }, ...]; `origin`: another
      service's, or "". */
  compare(variants, span = null) {
    const [names, origins] = [variants.map(({ name }) => name), variants.map(({ origin = "" }) => origin)];
    return this.#start(variants.map(({ typed }) => typed), { names, origins, span });
  }

  /** Repeats the last run from where it began. The current text stays in the tree. */
  regenerate(typed) {
    if (!this.canRegenerate) return null;
    const { parent, state, facts } = this.#tree.lastRun;
    if (facts.span) {
      this.#show(this.#tree.go(parent));
      return this.#start(typed, { span: { ...facts.span, start: facts.at } });
    }
    const before = new Manuscript(state);
    before.cut(facts.at);
    const isPicked = before.text !== this.#tree.node(parent).state.text; // it started after a picked token
    this.#show(this.#tree.go(parent), before);
    return isPicked ? this.#start({ ...typed, n: "" }, { picked: first(facts) }) : this.#start(typed);
  }

  /** Cuts the text at `at`, appends `token` instead, and continues. */
  pick(at, token, typed) {
    if (this.running) return null;
    this.#manuscript.cut(at);
    const { start, end } = this.#manuscript.append(token.text, [token]);
    this.#view.changed();
    const picked = { from: at, lengths: [end - start], values: [logprobOf([token])] };
    return this.#start({ ...typed, n: "" }, { picked });
  }

  stop() {
    this.#run?.abort.abort();
  }

  /** The history as if the run ended now, for a page that closes during a run. */
  get soFar() {
    if (!this.running) return this.#tree;
    const tree = Tree.from(this.#tree.data);
    keep(tree, this.#run);
    return tree;
  }

  // `picked`: the logprobs of the token that the user chose and the run continues, or null.
  async #start(typed, { picked = null, names = [], origins = [], span = null } = {}) {
    if (this.running) return;
    const abort = new AbortController();
    const { signal } = abort;
    const count = Array.isArray(typed) ? typed.length : continuations(typed.n);
    const before = this.text;
    const drafts = count === 1 ? [this.#manuscript] : Array.from({ length: count }, () => this.#draft());
    if (span) for (const draft of drafts) draft.open(span.start, span.end);
    const at = span?.start ?? before.length;
    const facts = drafts.map((_, index) => ({
      typed: Array.isArray(typed) ? typed[index] : typed,
      count: 0,
      at,
      index,
      logprobs: logprobsFrom(at, picked),
      ...(names.length ? { preset: names[index] } : {}),
      ...(origins[index] ? { origin: origins[index] } : {}),
    }));
    const run = (this.#run = { abort, before, drafts, facts, picked, span });
    this.#view.began(count, typed, names, span);
    let error = null;
    try {
      const fieldsOf = (one) => (span?.isInfill ? { ...one, suffix: before.slice(span.end) } : one);
      const fields = Array.isArray(typed) ? typed.map(fieldsOf) : fieldsOf(typed);
      for await (const { type, data } of this.#complete(before.slice(0, at), fields, signal, origins)) {
        if (type === "token") this.#write(drafts, facts, data);
        note(facts, type, data);
        this.#view.received(type, data);
      }
    } catch (thrown) {
      error = signal.aborted ? null : thrown;
    }
    this.#run = null;
    this.#typedAt = -Infinity;
    if (span) close(run);
    const nodes = keep(this.#tree, run);
    if (span && count === 1 && !nodes[0]) this.#manuscript = new Manuscript(this.#tree.current.state); // no text
    this.#view.ended({ error, stopped: signal.aborted, nodes });
  }

  #draft() {
    return new Manuscript(this.#manuscript.state);
  }

  #write(drafts, facts, { index = 0, text, tokens = null }) {
    const dropped = facts[index].count === 0 ? this.#blankAtLineStart(text) : "";
    if (dropped) facts[index].dropped = dropped;
    const unit = drafts[index].append(text.slice(dropped.length), tokens);
    facts[index].count += 1;
    facts[index].logprobs.lengths.push(unit.end - unit.start);
    facts[index].logprobs.values.push(logprobOf(tokens));
    this.#view.wrote(index, unit, drafts[index].text.slice(unit.start, unit.end));
  }

  // The space at the beginning of the first token, which is dropped if the token begins a line.
  #blankAtLineStart(text) {
    const { before, span } = this.#run;
    const isLineStart = span && !span.isInfill && [undefined, "\n"].includes(before[span.start - 1]);
    return isLineStart ? /^ */.exec(text)[0] : "";
  }

  #show(node, manuscript = new Manuscript(node.state)) {
    this.#typedAt = -Infinity;
    this.#manuscript = manuscript;
    this.#view.changed();
  }
}

// Adds a node for each non-empty text of a run. An empty one would be a step of undo without effect.
function keep(tree, { before, drafts, facts, picked, span }) {
  return drafts.map((draft, index) => {
    const one = span ? { ...facts[index], span: { until: lengthOf(facts[index]) + span.start, ...span, ...facts[index].span } } : facts[index];
    const isEmpty = span ? one.span.until === span.start : !picked && draft.text === before;
    if (isEmpty) return null;
    const isOnly = drafts.length === 1;
    return isOnly ? tree.commit("run", draft.state, one) : tree.add("run", draft.state, one);
  });
}

// Joins the texts that were written into a span with the text after it.
function close({ before, drafts, facts, span }) {
  drafts.forEach((draft, index) => {
    const length = lengthOf(facts[index]);
    const written = draft.text.slice(span.start, span.start + length);
    const behind = before.slice(span.end);
    const fitted = span.isInfill ? { length, blank: "" } : fit(written, before.slice(span.start, span.end), behind);
    draft.close(span.start + fitted.length, fitted.blank);
    facts[index].span = { until: span.start + fitted.length };
  });
}

function lengthOf({ logprobs: { lengths } }) {
  return lengths.reduce((sum, length) => sum + length, 0);
}

// The logprobs of a run's tokens: { from, lengths, values }, offsets and lengths in characters.
function logprobsFrom(at, picked) {
  return picked ? structuredClone(picked) : { from: at, lengths: [], values: [] };
}

// The logprobs of the picked token with which a run began, or none.
function first({ at, logprobs = { from: at, lengths: [], values: [] } }) {
  const { from, lengths, values } = logprobs;
  return from < at ? { from, lengths: lengths.slice(0, 1), values: values.slice(0, 1) } : logprobsFrom(at);
}

function logprobOf(tokens) {
  if (!tokens?.length || tokens.some(({ logprob }) => typeof logprob !== "number")) return null;
  return Number(tokens.reduce((sum, { logprob }) => sum + logprob, 0).toFixed(3));
}

// Number of continuations; 1 if n is invalid, so that the server reports the error.
function continuations(n) {
  const count = Number(n);
  return Number.isInteger(count) && count > 1 && count <= MOST_CHOICES ? count : 1;
}

// Records what describes and reproduces a run: seed, finish reasons, receipts.
function note(facts, type, data) {
  if (type === "start") for (const one of facts) one.seed = String(data.seed);
  if (type !== "done") return;
  for (const { index, finish_reason: reason } of data.choices) if (facts[index]) facts[index].finish = reason;
  for (const one of facts) one.receipt = data.receipts ? data.receipts[one.index] : data.receipt;
}
