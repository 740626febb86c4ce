// Several continuations side by side over the sheet, below the end of the text, while they stream. The user takes one or
// none. main.js supplies the events.

import { classed, element, put } from "../elements.js";
import { Mirror } from "./mirror.js";

const FIELDS = "input, textarea, select, [contenteditable]";

export class Columns {
  #root;
  #over;
  #handlers;
  #columns = [];
  #before = null; // the element that had the focus
  #keys = null; // the AbortController of the keydown listener
  #running = false;
  #frame = 0;

  /**
   * `root` covers the element `over`. Closes itself before it calls ontake(index) or onclose(); announce(words) speaks to
   * screen readers.
   */
  constructor(root, { over, ontake, onclose, announce }) {
    [this.#root, this.#over] = [root, over];
    this.#handlers = { ontake, onclose, announce };
    root.setAttribute("role", "group");
    root.tabIndex = -1;
  }

  get isOpen() {
    return this.#keys !== null;
  }

  /** Opens columns for `count` continuations of `tail`, the end of the text so far, that replace `replaced`. `names` are
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
    this.#handlers.announce(`${count} ${what}.`);
  }

  /** Appends text to a continuation; `tokens` as the server sent them, or null. Written once a frame. */
  append(index, text, tokens = null) {
    this.#columns[index].append(text, tokens);
    this.#frame ||= requestAnimationFrame(() => this.#write());
  }

  /** A continuation has ended. */
  finish(index, reason) {
    this.#columns[index].finish(reason);
    this.#handlers.announce(`Continuation ${index + 1} ended.`);
  }

  /** Replaces the text of a continuation. */
  fit(index, text) {
    this.#write();
    this.#columns[index].fit(text);
  }

  /** The run has ended: the user can take a continuation. */
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

  // Invisible but laid out from the start, so that nothing moves when it appears.
  #foot(count) {
    const none = classed("button", "quiet", "Take none");
    none.type = "button";
    none.addEventListener("click", () => this.#leave());
    return classed("p", "columns-note later", `All ${count} stay as branches. `, none);
  }

  // Does not scroll: the user compares the beginnings.
  #write() {
    cancelAnimationFrame(this.#frame);
    this.#frame = 0;
    for (const column of this.#columns) column.write();
  }

  #take(index) {
    if (this.#running || !this.#columns[index]?.hasText) return;
    this.close();
    this.#handlers.ontake(index);
  }

  #leave() {
    this.close();
    this.#handlers.onclose();
  }

  #pressed(event) {
    if (event.defaultPrevented || event.target.closest("dialog")) return; // the key has just stopped the run
    if (event.ctrlKey || event.metaKey || event.altKey || event.isComposing) return;
    const number = /^[1-9]$/.test(event.key) && !event.target.closest(FIELDS) ? Number(event.key) : 0;
    if (number > 0) this.#take(number - 1);
    else if (event.key === "Escape" && !this.#running) this.#leave();
    else return;
    event.preventDefault();
  }
}

/** The line above the columns: the text that they continue. */
export function lead(...words) {
  const line = classed("p", "tail", ...words);
  line.tabIndex = 0; // scrollable by keyboard
  return line;
}

// One of several continuations: its streamed text, finish reason, mean probability, and the button that takes it.
class Column {
  #box = classed("div", "abreast-text inks");
  #text = new Mirror(this.#box);
  #written = false;
  #facts = classed("span", "facts");
  #button = classed("button", "take");
  #pending = "";
  #logprob = 0; // sum over #tokens
  #tokens = 0;
  #ended = false;

  /** `number`, from 1, is also the key that takes it; `name` is a heading, or "". */
  constructor(number, ontake, name = "") {
    this.#box.tabIndex = 0; // scrollable by keyboard
    this.#box.setAttribute("role", "group");
    this.#box.setAttribute("aria-label", `Continuation ${number}${name && `, ${name}`}`);
    put(this.#button, "Take this ", element("kbd", String(number)));
    this.#button.type = "button";
    this.#button.setAttribute("aria-label", `Take this ${number}`); // phones hide the number
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

  /** `tokens` as the server sent them, or null. Visible after the next write(). */
  append(text, tokens) {
    this.#pending += text;
    const known = (tokens ?? []).filter(({ logprob }) => logprob !== null);
    for (const { logprob } of known) this.#logprob += logprob;
    this.#tokens += known.length;
  }

  write() {
    // Most tokens start with a space, which would look like an indent at the top of a column.
    if (this.#pending !== "") this.#text.append(this.#written ? this.#pending : this.#pending.replace(/^ +/, ""));
    this.#written ||= this.#pending !== "";
    this.#pending = "";
  }

  /** Replaces the text. */
  fit(text) {
    const shown = text.replace(/^ +/, "");
    this.#text.paint(shown, [[0, shown.length]]);
  }

  /** `reason`: the server's finish_reason. Shows the geometric mean of the tokens' probabilities. */
  finish(reason) {
    const mean = Math.exp(this.#logprob / this.#tokens).toFixed(2);
    this.#facts.textContent = this.#tokens ? `${reason} \u00b7 mean probability ${mean}` : reason;
    this.#ended = true;
  }

  offer() {
    if (this.hasText) this.#button.setAttribute("aria-disabled", "false");
  }
}
