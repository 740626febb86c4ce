// The tree strip: a dot for each entry of the outline, connected to its parent, and a line that describes one dot. A
// single tab stop, in which arrow keys follow the edges (ARIA tree).

import { classed, element } from "../elements.js";
import { inOrder, lay, neighbour } from "./tree-layout.js";
import { titleOf } from "./tree-view.js";

const COLUMN = 32; // px between dots
const LANE = 24; // px between lanes: the least height of a touch target

export class Branches {
  #root;
  #onselect;
  #strip = classed("div", "branch-strip");
  #lines = [svg("path"), svg("path")]; // other edges, and the current path's
  #words = classed("p", "branch-words");
  #dots = new Map(); // id -> element, reused so that it keeps the focus
  #entries = new Map();
  #places = new Map();
  #stop = null; // the id of the dot in the tab order
  #current = null;

  /** `root`: a section of the page; `onselect(entry)`: the user selected a dot. */
  constructor(root, { onselect }) {
    this.#root = root;
    this.#onselect = onselect;
    const picture = svg("svg");
    picture.setAttribute("aria-hidden", "true");
    picture.append(...this.#lines);
    this.#strip.setAttribute("role", "tree");
    this.#strip.setAttribute("aria-label", "Runs");
    this.#strip.append(picture);
    this.#words.setAttribute("aria-hidden", "true"); // repeats the dot's label
    root.hidden = true;
    root.append(this.#strip, this.#words);
    this.#strip.addEventListener("click", (event) => this.#select(dotOf(event)));
    this.#strip.addEventListener("keydown", (event) => this.#pressed(event));
    this.#strip.addEventListener("focusin", (event) => this.#focused(dotOf(event)));
    this.#strip.addEventListener("focusout", () => this.#settle());
    this.#strip.addEventListener("pointerover", (event) => (dotOf(event) ? this.#describe(dotOf(event)) : this.#settle()));
    this.#strip.addEventListener("pointerleave", () => this.#settle());
  }

  /** Draws the entries of outline(). */
  show(entries) {
    this.#entries = new Map(entries.map((entry) => [entry.key, entry]));
    const { places, edges, columns, lanes } = lay(entries.map((entry) => ({ ...entry, id: entry.key })));
    this.#places = places;
    this.#current = entries.find(({ current }) => current)?.key ?? null;
    this.#stop = this.#current ?? this.#entries.keys().next().value;
    this.#root.hidden = entries.length < 3; // undo and redo suffice for one run
    this.#draw(edges, columns, lanes);
    this.#order();
    this.#describe(this.#current);
    if (!this.#root.hidden) this.#reveal();
  }

  /** Disables the dots during a run. */
  hold(held) {
    this.#strip.setAttribute("aria-disabled", String(held));
  }

  #draw(edges, columns, [first, last]) {
    const spot = ({ column, lane }) => ({ x: (column + 0.5) * COLUMN, y: (lane - first + 0.5) * LANE });
    const strokes = ["", ""];
    for (const { from, to, here } of edges) {
      const [a, b] = [spot(this.#places.get(from)), spot(this.#places.get(to))];
      const middle = (a.x + b.x) / 2;
      strokes[Number(here)] += `M${a.x} ${a.y}C${middle} ${a.y} ${middle} ${b.y} ${b.x} ${b.y}`;
    }
    this.#lines.forEach((line, i) => line.setAttribute("d", strokes[i]));
    const picture = this.#strip.firstChild;
    picture.setAttribute("width", columns * COLUMN);
    picture.setAttribute("height", (last - first + 1) * LANE);
    for (const [id, dot] of this.#dots) if (!this.#entries.has(id)) (dot.remove(), this.#dots.delete(id));
    for (const place of this.#places.values()) this.#place(place, spot(place));
  }

  #place({ id, parent, column }, { x, y }) {
    const dot = this.#dots.get(id) ?? newDot(id);
    const run = this.#entries.get(id);
    const among = this.#places.get(parent)?.children ?? [id];
    this.#dots.set(id, dot);
    dot.style.transform = `translate(${x - LANE / 2}px, ${y - LANE / 2}px)`;
    dot.tabIndex = id === this.#stop ? 0 : -1;
    dot.classList.toggle("here", Boolean(run.here));
    set(dot, "aria-label", sentence(run));
    set(dot, "aria-selected", String(id === this.#current));
    set(dot, "aria-level", column + 1);
    set(dot, "aria-setsize", among.length);
    set(dot, "aria-posinset", among.indexOf(id) + 1);
  }

  // Puts the dots in depth-first order for screen readers. Never moves an existing dot, which would lose the focus.
  #order() {
    let after = this.#strip.firstChild;
    for (const id of inOrder(this.#places)) {
      const dot = this.#dots.get(id);
      if (after.nextSibling !== dot) after.after(dot);
      after = dot;
    }
  }

  #reveal() {
    const dot = this.#dots.get(this.#current);
    if (!dot) return;
    const [strip, box] = [this.#strip.getBoundingClientRect(), dot.getBoundingClientRect()];
    const left = box.left - strip.left - (strip.width - box.width) * 0.7; // shows more of its ancestors
    const top = box.top - strip.top - (strip.height - box.height) / 2;
    this.#strip.scrollBy({ left, top });
  }

  #select(id) {
    const held = this.#strip.getAttribute("aria-disabled") === "true";
    if (!held && id !== null && id !== this.#current) this.#onselect(this.#entries.get(id));
  }

  #pressed(event) {
    const id = dotOf(event);
    if (id === null || event.ctrlKey || event.metaKey || event.altKey) return;
    const other = neighbour(this.#places, id, event.key);
    const chosen = event.key === "Enter" || event.key === " ";
    if (other === null && !chosen && !/^(Arrow|Home|End)/.test(event.key)) return;
    event.preventDefault(); // no scrolling, even by an arrow key that leads nowhere
    if (chosen) this.#select(id);
    else if (other !== null) this.#dots.get(other).focus();
  }

  #focused(id) {
    if (id === null) return;
    if (this.#dots.has(this.#stop)) this.#dots.get(this.#stop).tabIndex = -1;
    this.#dots.get(id).tabIndex = 0;
    this.#stop = id;
    this.#describe(id);
  }

  #settle() {
    this.#describe(dotOf({ target: document.activeElement }) ?? this.#current);
  }

  #describe(id) {
    const run = this.#entries.get(id);
    const text = run ? sentence(run) : "";
    if (this.#words.textContent !== text) this.#words.textContent = text;
  }
}

function dotOf({ target }) {
  return target.closest?.("[role=treeitem]")?.dataset.id ?? null;
}

function newDot(id) {
  const dot = element("div");
  dot.dataset.id = id;
  dot.setAttribute("role", "treeitem");
  return dot;
}

function sentence(entry) {
  const { name, words, kind, facts: { finish, seed } } = entry;
  const parts = [titleOf(entry), ...(name ? [name] : []), words || "nothing yet"];
  if (kind === "run" && finish) parts.push(`ended by ${finish}`);
  if (kind === "run" && seed !== undefined) parts.push(`seed ${seed}`);
  return parts.join(" \u00b7 ");
}

// Sets an attribute only if it changes: setting it again costs layout work and may be announced.
function set(dot, name, value) {
  if (dot.getAttribute(name) !== String(value)) dot.setAttribute(name, value);
}

function svg(name) {
  return document.createElementNS("http://www.w3.org/2000/svg", name);
}
