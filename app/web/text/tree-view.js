// The tree of branches as a collapsible list: each stretch of text once, its continuations below it, and a toolbar for the
// focused row. Rows without siblings are not indented, so that a long story stays readable.

import { classed, element, put } from "../elements.js";
import { Manuscript } from "./manuscript.js";
import { unfolded, within } from "./outline.js";

const LONGEST = 320; // characters shown of a stretch
const DEEPEST = 10; // visible steps of indentation
const HELP = "Branches. Arrow keys go from one to the next, Enter goes on writing there.";

export class TreeView {
  #root;
  #handlers;
  #outline = [];
  #rows = classed("div", "tree-rows");
  #foot = classed("div", "tree-foot");
  #facts = classed("p", "tree-facts");
  #tools = classed("div", "tree-tools");
  #note = classed("p", "tree-note");
  #buttons;
  #form;
  #elements = new Map(); // key -> row
  #entries = new Map(); // key -> entry
  #list = []; // the keys of visible rows, from the top down
  #focused = null; // the key of the row in the tab order
  #restore = null; // undoes the last deletion
  #tree = null; // the tree that was shown last

  /** The notebook whose tree this is; set before the first show(). */
  notebook;

  /** `ongo(entry)`: the user continues there; `oncompare(entry)`: compares it with the current text; `announce(words)`
      speaks to screen readers. */
  constructor(root, { ongo, oncompare, announce }) {
    [this.#root, this.#handlers] = [root, { ongo, oncompare, announce }];
    this.#rows.setAttribute("role", "tree");
    this.#rows.setAttribute("aria-label", HELP);
    this.#rows.addEventListener("keydown", (event) => this.#pressed(event));
    this.#rows.addEventListener("click", (event) => this.#clicked(event));
    this.#rows.addEventListener("dblclick", (event) => keyOf(event) !== null && this.#open());
    this.#rows.addEventListener("focusin", (event) => this.#focus(keyOf(event)));
    this.#buttons = this.#makeButtons();
    this.#tools.setAttribute("role", "toolbar");
    this.#tools.setAttribute("aria-label", "Branch");
    put(this.#tools, ...Object.values(this.#buttons));
    this.#form = this.#makeForm();
    put(root, this.#rows, put(this.#foot, this.#facts, this.#tools, this.#form, this.#note));
  }

  /** Shows these entries (outline.js) of the notebook's tree, at once or when the view opens. */
  show(entries) {
    this.#outline = entries;
    if (this.notebook.tree !== this.#tree) this.#showNote(""); // another document
    this.#tree = this.notebook.tree;
    if (!this.#root.hidden) this.#redraw();
  }

  /** Opens the view at the current text. */
  open({ withFocus }) {
    this.#redraw();
    this.#stop(this.#nearest(null));
    const row = this.#elements.get(this.#focused);
    if (withFocus) row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "center" });
  }

  /** Undoes the last deletion; false if there is none. */
  undo() {
    if (!this.#restore || this.notebook.running) return false;
    const restore = this.#restore;
    this.#showNote("");
    restore();
    this.#handlers.announce("Restored.");
    return true;
  }

  #redraw() {
    const hadFocus = this.#rows.contains(document.activeElement);
    this.#entries = new Map(this.#outline.map((entry) => [entry.key, entry]));
    this.#list = unfolded(this.#outline).map(({ key }) => key);
    const seen = new Set(this.#list);
    for (const [key, row] of this.#elements) if (!seen.has(key)) (row.remove(), this.#elements.delete(key));
    this.#draw(places(this.#outline));
    this.#stop(seen.has(this.#focused) ? this.#focused : this.#nearest(this.#focused));
    if (hadFocus) this.#toRow();
  }

  #toRow() {
    const row = this.#elements.get(this.#focused);
    row.focus({ preventScroll: true });
    row.scrollIntoView({ block: "nearest" });
  }

  get #entry() {
    return this.#entries.get(this.#focused);
  }

  // The visible row for a key: the collapsed ancestor that hides it, or the current text if it no longer exists.
  #nearest(key) {
    let entry = this.#entries.get(key) ?? [...this.#entries.values()].find(({ current }) => current);
    while (entry && !this.#elements.has(entry.key)) entry = this.#entries.get(entry.parent);
    return entry?.key ?? this.#list[0];
  }

  #draw(where) {
    let after = null;
    for (const key of this.#list) {
      const row = this.#elements.get(key) ?? newRow(key);
      this.#elements.set(key, row);
      this.#fill(row, this.#entries.get(key), where.get(key));
      // Does not move a row that is in place, which would lose the focus.
      if (after ? after.nextSibling !== row : this.#rows.firstChild !== row) after ? after.after(row) : this.#rows.prepend(row);
      after = row;
    }
  }

  #fill(row, entry, { depth, place, of, isParent }) {
    set(row, "aria-level", entry.level);
    set(row, "aria-posinset", place);
    set(row, "aria-setsize", of);
    set(row, "aria-selected", String(entry.current));
    if (isParent) set(row, "aria-expanded", String(!entry.isCollapsed));
    else row.removeAttribute("aria-expanded");
    row.className = `tree-row ${entry.kind}${entry.here ? " here" : ""}${entry.isBookmarked ? " bookmarked" : ""}`;
    row.style.setProperty("--depth", Math.min(depth, DEEPEST));
    const drawn = [entry.start, entry.kind, entry.number, entry.name, entry.isBookmarked, entry.chances.mean].join("\n");
    if (row.drawn === drawn) return;
    row.drawn = drawn;
    row.replaceChildren(...this.#content(entry));
  }

  #content(entry) {
    const { name, isBookmarked, chances } = entry;
    const parts = [classed("span", "twist"), classed("span", "unseen", `${titleOf(entry)}: `)];
    parts[0].setAttribute("aria-hidden", "true");
    const words = classed("span", "words", ...this.#stretch(entry));
    if (name) words.prepend(classed("span", "branch-name", name), " ");
    parts.push(words);
    if (isBookmarked) parts.push(classed("span", "unseen", ", bookmarked"));
    if (chances.mean !== null) {
      const chance = classed("span", "chance", classed("span", "unseen", ", mean probability "), chances.mean.toFixed(2));
      chance.style.setProperty("--share", chances.mean);
      parts.push(chance);
    }
    return parts;
  }

  // The text in two colors, as in the document.
  #stretch({ source, start, end }) {
    const { text, units } = this.notebook.tree.node(source).state;
    const first = start + text.slice(start, end).search(/\S|$/);
    const last = Math.min(end, first + LONGEST);
    const near = units.filter((unit) => unit.end > first && unit.start < last);
    const spans = [];
    let at = first;
    for (const [from, to] of new Manuscript({ text, units: near }).written) {
      spans.push(text.slice(at, Math.max(from, at)), classed("span", "written", text.slice(Math.max(from, at), Math.min(to, last))));
      at = Math.min(to, last);
    }
    spans.push(text.slice(at, last), last < end ? "\u2026" : "");
    return first < end ? spans : [classed("span", "nothing", "nothing yet")];
  }

  #stop(key) {
    const old = this.#elements.get(this.#focused);
    if (old) old.tabIndex = -1;
    this.#focused = key;
    const row = this.#elements.get(key);
    if (row) row.tabIndex = 0;
    this.#describe();
  }

  #focus(key) {
    if (key === null || key === this.#focused) return;
    this.#form.hidden = true;
    this.#stop(key);
  }

  #describe() {
    const entry = this.#entry;
    if (!entry) return;
    const off = (name, value) => this.#buttons[name].setAttribute("aria-disabled", String(value));
    this.#facts.textContent = factsOf(entry);
    this.#tools.hidden = !this.#form.hidden;
    off("open", this.notebook.running);
    off("compare", entry.current && entry.end === this.notebook.text.length);
    off("remove", this.notebook.running || entry.parent === null);
    this.#buttons.bookmark.setAttribute("aria-pressed", String(entry.isBookmarked));
    this.#buttons.next.hidden = ![...this.#entries.values()].some(({ isBookmarked }) => isBookmarked);
  }

  #makeButtons() {
    const button = (words, key, act) => {
      const made = put(element("button", words), key ? element("kbd", key) : "");
      made.type = "button";
      made.addEventListener("click", () => made.getAttribute("aria-disabled") !== "true" && act());
      return made;
    };
    return {
      open: button("Go on here", "\u23ce", () => this.#open()),
      compare: button("Compare", "C", () => this.#handlers.oncompare(this.#entry)),
      name: button("Name", "F2", () => this.#rename()),
      bookmark: button("Bookmark", "B", () => this.#bookmark()),
      next: button("Next bookmark", "N", () => this.#toBookmark()),
      remove: button("Delete", "Del", () => this.#remove()),
    };
  }

  #makeForm() {
    const input = element("input");
    Object.assign(input, { id: "branch-name", maxLength: 80, autocomplete: "off" });
    const label = Object.assign(element("label", "Name"), { htmlFor: input.id });
    const form = classed("form", "tree-name", label, input, Object.assign(element("button", "Save"), { type: "submit" }));
    form.hidden = true;
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#label({ name: input.value.trim() });
      this.#endNaming();
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.stopPropagation();
      this.#endNaming();
    });
    return form;
  }

  #rename() {
    this.#form.hidden = false;
    this.#describe();
    const input = this.#form.querySelector("input");
    input.value = this.#entry.name;
    input.focus();
    input.select();
  }

  #endNaming() {
    this.#form.hidden = true;
    this.#describe();
    this.#toRow();
  }

  #open() {
    if (!this.notebook.running) this.#handlers.ongo(this.#entry);
  }

  #label(labels) {
    this.notebook.label(this.#entry, labels);
  }

  #bookmark() {
    this.#label({ isBookmarked: !this.#entry.isBookmarked });
    this.#handlers.announce(this.#entry.isBookmarked ? "Bookmarked." : "Bookmark removed.");
  }

  #toBookmark() {
    const all = [...this.#entries.values()];
    const from = all.indexOf(this.#entry) + 1;
    const found = [...all.slice(from), ...all.slice(0, from)].find(({ isBookmarked }) => isBookmarked);
    if (!found) return;
    this.#unfold(found);
    this.#stop(found.key);
    this.#toRow();
  }

  // Expands the ancestors of an entry.
  #unfold({ parent }) {
    for (let entry = this.#entries.get(parent); entry; entry = this.#entries.get(entry.parent)) {
      if (entry.isCollapsed) this.notebook.label(entry, { isCollapsed: false });
    }
  }

  #remove() {
    const entry = this.#entry;
    if (this.notebook.running || entry.parent === null) return;
    const count = entriesBelow(this.#entries, entry.key);
    this.#stop(entry.parent);
    const restore = this.notebook.remove(within(this.notebook.tree, entry), this.#entry);
    this.#showNote(count === 1 ? "Deleted one branch." : `Deleted ${count} branches.`, () => {
      restore();
      this.#stop(this.#nearest(entry.key));
      this.#toRow();
    });
    this.#toRow();
  }

  #showNote(words, restore = null) {
    this.#restore = restore;
    const button = classed("button", "quiet", "Undo");
    button.type = "button";
    button.addEventListener("click", () => this.undo());
    this.#note.replaceChildren(...(words ? [`${words} `, button] : []));
    if (words) this.#handlers.announce(`${words} Control Z brings it back.`);
  }

  #clicked(event) {
    const key = keyOf(event);
    if (key === null) return;
    const { isCollapsed } = this.#entries.get(key);
    if (event.target.closest(".twist")) this.#fold(key, !isCollapsed);
    this.#elements.get(key).focus({ preventScroll: true });
  }

  #fold(key, isCollapsed) {
    if (this.#elements.get(key).hasAttribute("aria-expanded")) this.notebook.label(this.#entries.get(key), { isCollapsed });
  }

  #pressed(event) {
    if (event.target.getAttribute("role") !== "treeitem" || event.altKey) return;
    if (event.ctrlKey || event.metaKey) {
      const isUndo = event.key.toLowerCase() === "z" && !event.shiftKey;
      if (isUndo && this.undo()) (event.preventDefault(), event.stopPropagation());
      return;
    }
    const act = this.#actionOf(event.key);
    if (!act) return;
    event.preventDefault();
    act();
  }

  #actionOf(key) {
    const { open, compare, name, bookmark, next, remove } = this.#buttons;
    const buttons = { Enter: open, " ": open, c: compare, f2: name, b: bookmark, n: next, delete: remove, backspace: remove };
    const button = buttons[key] ?? buttons[key.toLowerCase()];
    if (button) return () => button.hidden || button.click();
    const to = this.#target(key);
    return to === undefined ? null : () => to !== null && this.#elements.get(to)?.focus();
  }

  // The row that a key leads to in an ARIA tree; null if there is none, undefined for other keys.
  #target(key) {
    const { isCollapsed, parent } = this.#entry;
    const at = this.#list.indexOf(this.#focused);
    const isParent = this.#elements.get(this.#focused).hasAttribute("aria-expanded");
    if (key === "ArrowDown") return this.#list[at + 1] ?? null;
    if (key === "ArrowUp") return this.#list[at - 1] ?? null;
    if (key === "Home") return this.#list[0];
    if (key === "End") return this.#list.at(-1);
    if (key === "ArrowRight" && isParent && !isCollapsed) return this.#list[at + 1];
    if (key === "ArrowLeft" && (!isParent || isCollapsed)) return parent;
    if (key !== "ArrowLeft" && key !== "ArrowRight") return undefined;
    this.#fold(this.#focused, key === "ArrowLeft");
    return null;
  }
}

/** The title of an entry. */
export function titleOf({ kind, number, parent, facts }) {
  if (number) return facts.preset ? `Run ${number}, ${facts.preset}` : `Run ${number}`;
  if (parent === null) return "Beginning";
  return kind === "parting" ? "Parting" : "Your text";
}

function factsOf(entry) {
  const { chances, facts, kind, isCollapsed } = entry;
  const facts_ = [titleOf(entry)];
  if (chances.mean !== null) facts_.push(`mean probability ${chances.mean.toFixed(2)}`);
  if (chances.first !== null) facts_.push(`first token ${percentOf(chances.first)}`);
  if (kind === "run" && facts.finish) facts_.push(`ended by ${facts.finish}`);
  if (kind === "run" && facts.seed !== undefined) facts_.push(`seed ${facts.seed}`);
  if (isCollapsed) facts_.push("folded");
  return facts_.join(" \u00b7 ");
}

function percentOf(share) {
  return `${share < 0.1 ? (100 * share).toPrecision(1) : Math.round(100 * share)}\u00a0%`;
}

// For each key its indentation, which grows at forks, and its position among its siblings.
function places(entries) {
  const children = new Map(entries.map(({ key }) => [key, []]));
  for (const { key, parent } of entries) children.get(parent)?.push(key);
  const where = new Map();
  for (const { key, parent } of entries) {
    const among = children.get(parent) ?? [key];
    const depth = (where.get(parent)?.depth ?? 0) + Number(among.length > 1);
    where.set(key, { depth, place: among.indexOf(key) + 1, of: among.length, isParent: children.get(key).length > 0 });
  }
  return where;
}

function entriesBelow(entries, top) {
  const inside = new Set([top]);
  for (const { key, parent } of entries.values()) if (inside.has(parent)) inside.add(key);
  return inside.size;
}

function newRow(key) {
  const row = element("div");
  row.dataset.key = key;
  row.tabIndex = -1;
  row.setAttribute("role", "treeitem");
  return row;
}

function keyOf({ target }) {
  return target.closest("[role=treeitem]")?.dataset.key ?? null;
}

function set(row, name, value) {
  if (row.getAttribute(name) !== String(value)) row.setAttribute(name, value);
}
