// The history as a prefix tree: each stretch of text appears once, with siblings where texts differ. (In the history
// itself a text that was changed in its middle is a child of the text before the change.) Pure: no DOM.
//
//   history:  "Once" -> "Once there was a king" -> (another token taken) "Once there was a cat"
//   outline:  "Once" - " there was a" - " king"
//                                     \ " cat"

const WORDS = 8;
const LONGEST_WORDS = 400; // characters that are searched for these words
const LONGEST_WORD = 32; // most characters by which a fork moves back to the beginning of a word

/**
 * A list of entries in depth-first order: {
 *   key        stable while the tree grows,
 *   parent     the key of the parent entry, or null,
 *   level      depth, from 1,
 *   kind       "run" generated, "text" written by the user, "parting" a fork without a node,
 *   id         the tree's node with this text, or null; `source`: the oldest node whose text includes this entry,
 *   start, end the entry's own stretch in the text of `source`; `words`: its first words,
 *   number     of the run, from 1,
 *   chances    of the stretch's tokens: { first, mean }, each a probability or null,
 *   facts, name, isBookmarked, isCollapsed   of the node,
 *   current    this entry is, or is the last one before, the current text; `here`: on the path to it; `next`: the child
 *              that redo goes to }
 */
export function outline(tree) {
  const { top, stemAt } = grow(tree);
  const stems = flat(top);
  const found = stemAt(tree.current);
  const current = stems.includes(found) ? found : top;
  const here = new Set();
  for (let stem = current; stem; stem = stem.parent) here.add(stem);
  const numbers = new Map(tree.nodes.filter(({ kind }) => kind === "run").map(({ id }, index) => [id, index + 1]));
  return stems.map((stem) => ({
    ...entry(stem, nodeOf(stem, tree.current), numbers),
    current: stem === current,
    here: here.has(stem),
    next: next(stem, tree),
  }));
}

/** The entries that no collapsed ancestor hides. */
export function unfolded(entries) {
  const hidden = new Set();
  return entries.filter(({ key, parent, isCollapsed }) => {
    const isHidden = hidden.has(parent);
    if (isHidden || isCollapsed) hidden.add(key);
    return !isHidden;
  });
}

/** The ids of all nodes whose text includes this entry, which are deleted with it. */
export function within(tree, { source, start, end }) {
  const { text } = tree.node(source).state;
  const goesThrough = (other) => parting(text.slice(0, end), other, start) > start;
  return tree.nodes.filter(({ state }) => goesThrough(state.text)).map(({ id }) => id);
}

/** The length of two texts' common prefix, moved back to the beginning of a word unless it ends one of them. Their first
    `from` characters are known to be the same. */
export function parting(a, b, from) {
  const shorter = Math.min(a.length, b.length);
  let at = from;
  while (at < shorter && a[at] === b[at]) at += 1;
  if (at === shorter) return at;
  const isLetter = (index) => /[\p{L}\p{N}\p{M}'\u2019\ud800-\udbff]/u.test(a[index]);
  let start = at;
  while (start > from && isLetter(start - 1)) start -= 1;
  if (at - start > LONGEST_WORD) start = /[\ud800-\udbff]/.test(a[at - 1]) ? at - 1 : at;
  return start > from && a[start - 1] === " " ? start - 1 : start;
}

// A stem is a node of the prefix tree, where texts fork or one ends: { source, end, parent, children, nodes }.
function grow(tree) {
  const root = stemOf(tree.nodes[0], 0, null);
  const stemOfNode = new Map();
  // The stem of the nearest ancestor whose text this one continues. Most texts continue their parent's, so this is fast.
  const from = ({ parent, state }, end) => {
    for (let node = tree.node(parent); node; node = tree.node(node.parent)) {
      const stem = stemOfNode.get(node.id);
      if (stem && stem.end <= end && state.text.startsWith(node.state.text)) return stem;
    }
    return root;
  };
  for (const [source, end] of points(tree)) {
    const stem = plant(from(source, end), source, end);
    if (end === source.state.text.length) stemOfNode.set(source.id, stem);
  }
  const parents = new Set(tree.nodes.map(({ parent }) => parent));
  const ends = tree.nodes.filter(({ id }) => !stemOfNode.has(id) && !parents.has(id));
  ends.sort((a, b) => b.state.text.length - a.state.text.length);
  for (const node of ends) if (!isOn(from(node), node.state.text)) plant(root, node, node.state.text.length);
  const stemAt = (node) => stemOfNode.get(node.id) ?? follow(from(node, node.state.text.length), node.state.text);
  for (const node of tree.nodes) {
    const stem = stemAt(node);
    if (stem.end === node.state.text.length) stem.nodes.push(node);
  }
  settle(root);
  const top = root.nodes.length || root.children.length !== 1 ? root : root.children[0];
  top.parent = null; // the common prefix of all texts
  return { top, stemAt };
}

// The texts that always get an entry: runs, prompts of runs that are no run's text, and what the user labeled.
function points(tree) {
  return tree.nodes.flatMap((node) => {
    const { kind, facts, state, name, isBookmarked } = node;
    if (kind !== "run") return name || isBookmarked ? [[node, state.text.length]] : [];
    const start = Math.min(facts.at ?? 0, facts.logprobs?.from ?? Infinity);
    const before = lastRun(tree, node.parent)?.state.text;
    const text = state.text.slice(0, start);
    const isNew = before === undefined || !(text.startsWith(before) || before.startsWith(text));
    return [...(isNew ? [[node, start]] : []), [node, state.text.length]];
  });
}

function lastRun(tree, id) {
  let node = tree.node(id);
  while (node && node.kind !== "run") node = tree.node(node.parent);
  return node;
}

function plant(from, source, end) {
  const text = source.state.text.slice(0, end);
  let stem = from;
  while (stem.end < end) {
    const shares = stem.children.map((child) => shared(child, text));
    const best = Math.max(stem.end, ...shares);
    const child = stem.children[shares.indexOf(best)];
    if (best === stem.end) stem = graft(stem, source, end);
    else stem = best === child.end ? child : split(child, best);
  }
  return stem;
}

function graft(parent, source, end) {
  const stem = stemOf(source, end, parent);
  parent.children.push(stem);
  return stem;
}

function shared(child, text) {
  const { end, parent, source } = child;
  const start = parent?.end ?? 0;
  if (text.startsWith(source.state.text.slice(start, end), start)) return end;
  return parting(source.state.text.slice(0, end), text, start);
}

function split(child, end) {
  const { parent, source } = child;
  const stem = stemOf(source, end, parent);
  parent.children[parent.children.indexOf(child)] = stem;
  stem.children.push(child);
  child.parent = stem;
  return stem;
}

function stemOf(source, end, parent) {
  return { source, end, parent, children: [], nodes: [] };
}

// The last stem on the path of this text.
function follow(from, text) {
  let stem = from;
  for (;;) {
    const child = stem.children.find((one) => one.end <= text.length && shared(one, text) === one.end);
    if (!child) return stem;
    stem = child;
  }
}

function isOn(from, text) {
  const { end, children } = follow(from, text);
  return end === text.length || children.some((child) => textOf(child).startsWith(text));
}

// Sets each stem's source to the oldest text that includes it, and sorts children by age.
function settle(stem) {
  for (const child of stem.children) settle(child);
  for (const { source } of stem.children) if (source.id < stem.source.id) stem.source = source;
  stem.children.sort((a, b) => a.source.id - b.source.id);
}

function flat(stem) {
  const list = [];
  const open = [stem];
  while (open.length) {
    const one = open.pop();
    list.push(one);
    open.push(...[...one.children].reverse());
  }
  return list;
}

function textOf({ source, end }) {
  return source.state.text.slice(0, end);
}

// Among nodes with the same text: the current one, else the last run, else the last.
function nodeOf({ nodes }, current) {
  return nodes.find((node) => node === current) ?? nodes.findLast(({ kind }) => kind === "run") ?? nodes.at(-1) ?? null;
}

function next(stem, tree) {
  for (let node = nodeOf(stem, tree.current); node; node = tree.node(node.latest)) {
    const child = stem.children.find((one) => node.state.text.startsWith(textOf(one)));
    if (child) return keyOf(child);
  }
  return null;
}

function entry(stem, node, numbers) {
  const { nodes, source, end, parent, children } = stem;
  const start = parent?.end ?? 0;
  stem.level = (parent?.level ?? 0) + 1;
  const marked = (name) => nodes.find((one) => one[name])?.[name];
  return {
    key: keyOf(stem),
    parent: parent ? keyOf(parent) : null,
    level: stem.level,
    kind: node?.kind ?? "parting",
    id: node?.id ?? null,
    source: source.id,
    start,
    end,
    words: wordsOf(source.state.text.slice(start, end)),
    number: numbers.get(node?.id) ?? null,
    chances: chances(source, start, end),
    facts: node?.facts ?? {},
    name: marked("name") ?? "",
    isBookmarked: marked("isBookmarked") ?? false,
    isCollapsed: (marked("isCollapsed") ?? false) && children.length > 0,
  };
}

function keyOf({ source, end }) {
  return `${source.id}.${end}`;
}

function wordsOf(stretch) {
  const beginning = stretch.slice(0, LONGEST_WORDS).replace(/^[.,;:!?]+(?=\s)/u, ""); // ends the previous sentence
  const words = beginning.trim().split(/\s+/);
  return words.slice(0, WORDS).join(" ") + (words.length > WORDS ? " \u2026" : "");
}

// A run stores its tokens' logprobs as { from, lengths, values }, null if unknown; lengths in characters.
function chances({ facts: { logprobs } }, start, end) {
  let [at, sum, count, first] = [logprobs?.from ?? 0, 0, 0, null];
  (logprobs?.lengths ?? []).forEach((length, index) => {
    const value = logprobs.values[index];
    if (value !== null && at >= start && at < end) {
      if (at === start) first = Math.exp(value);
      sum += value;
      count += 1;
    }
    at += length;
  });
  return { first, mean: count ? Math.exp(sum / count) : null };
}
