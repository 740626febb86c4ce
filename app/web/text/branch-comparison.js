// Two branches side by side over the sheet: their common text above, and the words that differ marked.

import { classed, element, put } from "../elements.js";
import { lead } from "./columns.js";
import { parting } from "./outline.js";
import { lastSentence } from "./sentences.js";
import { wordDifference } from "./word-difference.js";

export class BranchComparison {
  #root;
  #over;
  #handlers;
  #before = null; // the element that had the focus
  #keys = null; // the AbortController of the keydown listener

  /** `root` covers the element `over`; `ontake(index)`: the user takes that text; `onclose()`: neither. */
  constructor(root, { over, ontake, onclose }) {
    [this.#root, this.#over, this.#handlers] = [root, over, { ontake, onclose }];
    root.setAttribute("role", "group");
    root.setAttribute("aria-label", "Two branches compared");
    root.tabIndex = -1;
  }

  get isOpen() {
    return this.#keys !== null;
  }

  /** `sides`: two of { title, text }. */
  open(sides) {
    this.close();
    this.#keys = new AbortController();
    document.addEventListener("keydown", (event) => this.#pressed(event), { signal: this.#keys.signal });
    const [a, b] = sides.map(({ text }) => text);
    const at = parting(a, b, 0);
    const { a: left, b: right, count } = wordDifference(a.slice(at).trimStart(), b.slice(at).trimStart());
    const columns = [left, right].map((pieces, index) => this.#column(sides[index].title, pieces, index));
    const words = count === 1 ? "They differ in one place. " : `They differ in ${count || "no"} places. `;
    const close = classed("button", "quiet", "Close");
    close.type = "button";
    close.addEventListener("click", () => this.#leave());
    this.#root.replaceChildren(
      lead(lastSentence(a.slice(0, at))),
      classed("div", "abreast abreast-2", ...columns),
      classed("p", "columns-note", words, close),
    );
    this.#before = document.activeElement;
    this.#root.hidden = false;
    this.#over.inert = true;
    this.#root.focus({ preventScroll: true });
    this.#root.scrollIntoView({ block: "nearest" });
  }

  close() {
    if (!this.isOpen) return;
    this.#keys.abort();
    this.#keys = null;
    const isInside = this.#root.contains(document.activeElement);
    this.#over.inert = false;
    this.#root.hidden = true;
    this.#root.replaceChildren();
    if (isInside) this.#before?.focus({ preventScroll: true });
  }

  #column(title, pieces, index) {
    const text = classed("div", "abreast-text compared", ...pieces.map(([isDifferent, piece]) => (isDifferent ? element("mark", piece) : piece)));
    text.tabIndex = 0; // scrollable by keyboard
    text.setAttribute("role", "group");
    text.setAttribute("aria-label", title);
    if (!pieces.length) text.append(classed("span", "nothing", "ends here"));
    const button = put(element("button", "Take this "), element("kbd", String(index + 1)));
    button.type = "button";
    button.setAttribute("aria-label", `Take this ${index + 1}`);
    button.setAttribute("aria-keyshortcuts", String(index + 1));
    button.addEventListener("click", () => this.#take(index));
    return classed("div", "abreast-one", classed("p", "abreast-name", title), text, classed("div", "abreast-foot", button));
  }

  #take(index) {
    this.close();
    this.#handlers.ontake(index);
  }

  #leave() {
    this.close();
    this.#handlers.onclose();
  }

  #pressed(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest("input, textarea, select")) return;
    if (event.key === "1" || event.key === "2") this.#take(Number(event.key) - 1);
    else if (event.key === "Escape") this.#leave();
    else return;
    event.preventDefault();
  }
}
