// Continuations side by side, over the sheet: how the text ends so far, and the ways in which it may go on, as they
// stream. One is taken, or none. main.js supplies the events.

import { classed, element, put } from "../elements.js";
import { Mirror } from "./mirror.js";

const FIELDS = "input, textarea, select, [contenteditable]";

export class Columns {
  #root;
  #over;
  #hear;
  #columns = [];
  #before = null; // what had the focus
  #keys = null; // the AbortController of the listener for keys
  #running = false;
  #frame = 0;

  /**
   * `root` stands over the element `over`. Closes itself, and then calls ontake(index) or onclose();
   * announce(words) is for who does not see it.
   */
  constructor(root, { over, ontake, onclose, announce }) {
    [this.#root, this.#over] = [root, over];
    this.#hear = { ontake, onclose, announce };
    root.setAttribute("role", "group");
    root.tabIndex = -1;
  }

  get isOpen() {
    return this.#keys !== null;
  }

  /** Columns for `count` continuations behind `tail`, the end of the text so far, in place of `replaced`. `names` are
      headings, or []. */
  open(count, tail, { names = [], replaced = "" } = {}) {
    this.close();
    this.#running = true;
    this.#keys = new AbortController();
    document.addEventListener("keydown", (event) => this.#pressed(event), { signal: this.#keys.signal });
    this.#columns = Array.from({ length: count }, (_, index) => {
      return new Column(index + 1, () => this.#take(index), names[index]);
    });
    const what = replaced ? "alternatives" : "continuations";
    this.#root.setAttribute("aria-label", `${count} ${what}`);
    this.#root.replaceChildren(
      lead(tail, ...(replaced ? [" ", classed("mark", "replaced", replaced.trim())] : [])),
      classed("div", `abreast abreast-${Math.min(count, 4)}`, ...this.#columns.map(({ element }) => element)),
      this.#foot(count),
    );
    this.#root.hidden = false;
    this.#before = document.activeElement;
    if (this.#over.contains(this.#before) || this.#before === document.body) this.#root.focus({ preventScroll: true });
    this.#over.inert = true;
    this.#root.scrollIntoView({ block: "nearest" });
    this.#hear.announce(`${count} ${what}.`);
  }

  /** More of one of them; `tokens` as the server told them, or null. All are written in one go, once a frame. */
  append(index, text, tokens = null) {
    this.#columns[index].append(text, tokens);
    this.#frame ||= requestAnimationFrame(() => this.#write());
  }

  /** One of them has ended. */
  finish(index, reason) {
    this.#columns[index].finish(reason);
    this.#hear.announce(`Continuation ${index + 1} ended.`);
  }

  /** The text of one of them is this one. */
  fit(index, text) {
    this.#write();
    this.#columns[index].fit(text);
  }

  /** The run is over: what has come can be taken. */
  end() {
    if (!this.isOpen) return;
    this.#write();
    this.#running = false;
    for (const column of this.#columns) {
      if (!column.ended) column.finish("stopped");
      column.offer();
    }
    this.#root.lastElementChild.classList.remove("later");
  }

  close() {
    if (!this.isOpen) return;
    this.#keys.abort();
    cancelAnimationFrame(this.#frame);
    [this.#keys, this.#frame, this.#running] = [null, 0, false];
    const inside = this.#root.contains(document.activeElement);
    this.#over.inert = false;
    this.#root.hidden = true;
    this.#root.replaceChildren();
    if (inside) this.#before.focus({ preventScroll: true });
  }

  // It takes its room from the beginning, so that nothing moves once it is seen.
  #foot(count) {
    const none = classed("button", "quiet", "Take none");
    none.type = "button";
    none.addEventListener("click", () => this.#leave());
    return classed("p", "columns-note later", `All ${count} stay as branches. `, none);
  }

  // The view stays at the beginnings: they are what is compared.
  #write() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    for (const column of this.#columns) column.write();
  }

  #take(index) {
    if (this.#running || !this.#columns[index]?.hasText) return;
    this.close();
    this.#hear.ontake(index);
  }

  #leave() {
    this.close();
    this.#hear.onclose();
  }

  #pressed(event) {
    if (event.defaultPrevented || event.target.closest("dialog")) return; // it stopped the run just now
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const number = /^[1-9]$/.test(event.key) && !event.target.closest(FIELDS) ? Number(event.key) : 0;
    if (number > 0) this.#take(number - 1);
    else if (event.key === "Escape" && !this.#running) this.#leave();
    else return;
    event.preventDefault();
  }
}

/** The line above columns: what they go on from. */
export function lead(...words) {
  const line = classed("p", "tail", ...words);
  line.tabIndex = 0; // it may have to be scrolled
  return line;
}

// One continuation among several: its text as it streams, how it ended, how sure the model was of it, and the button that
// takes it.
class Column {
  #box = classed("div", "abreast-text inks");
  #text = new Mirror(this.#box);
  #written = false;
  #facts = classed("span", "facts");
  #button = classed("button", "take");
  #pending = "";
  #logprob = 0; // the sum over
  #tokens = 0; // so many tokens
  #ended = false;

  /** `number` counts from 1, and is the key that takes it; `name` is a heading, if there is one. */
  constructor(number, ontake, name = "") {
    this.#box.tabIndex = 0; // it may have to be scrolled
    this.#box.setAttribute("role", "group");
    this.#box.setAttribute("aria-label", `Continuation ${number}${name && `, ${name}`}`);
    put(this.#button, "Take this ", element("kbd", String(number)));
    this.#button.type = "button";
    this.#button.setAttribute("aria-label", `Take this ${number}`); // a phone shows no number
    this.#button.setAttribute("aria-keyshortcuts", String(number));
    this.#button.setAttribute("aria-disabled", "true");
    this.#button.addEventListener("click", ontake);
    const foot = classed("div", "abreast-foot", this.#button, this.#facts);
    this.element = classed("div", "abreast-one", classed("p", "abreast-name", name), this.#box, foot);
  }

  get ended() {
    return this.#ended;
  }

  get hasText() {
    return this.#written || this.#pending !== "";
  }

  /** `tokens` as the server told them, or null. Seen after the next write(). */
  append(text, tokens) {
    this.#pending += text;
    const told = (tokens ?? []).filter(({ logprob }) => logprob !== null);
    for (const { logprob } of told) this.#logprob += logprob;
    this.#tokens += told.length;
  }

  write() {
    // A token starts with its space, which would look like an indent at the top of a column.
    if (this.#pending !== "") this.#text.append(this.#written ? this.#pending : this.#pending.replace(/^ +/, ""));
    this.#written ||= this.#pending !== "";
    this.#pending = "";
  }

  /** This text in place of what was written. */
  fit(text) {
    const shown = text.replace(/^ +/, "");
    this.#text.paint(shown, [[0, shown.length]]);
  }

  /** `reason` as the server names it. The mean is the geometric one: the text's probability, shared out. */
  finish(reason) {
    const mean = Math.exp(this.#logprob / this.#tokens).toFixed(2);
    this.#facts.textContent = this.#tokens ? `${reason} \u00b7 mean probability ${mean}` : reason;
    this.#ended = true;
  }

  offer() {
    if (this.hasText) this.#button.setAttribute("aria-disabled", "false");
  }
}
