// The alternatives of a token: the most likely tokens of its position to choose from, with rank, surprise and entropy.
// Shown in a popover next to the token.

import { element, put } from "../elements.js";
import { Alternative, label, obstacle, walk } from "./alternative.js";
import { bits, entropy, percent, probability, rank, surprise } from "./token.js";

const MOST = 10; // alternatives in the list
const GAP = 6; // px

export class Popover {
  #root = element("div");
  #note = element("p");
  #onpick;
  #arrival;
  #anchor = null;
  #alternatives = [];
  #top = []; // all alternatives that the server sent

  /** `onpick(token)`: the user chose this alternative; `arrival(token)`: ms since the previous token, or undefined. */
  constructor(parent, { onpick, arrival }) {
    [this.#onpick, this.#arrival] = [onpick, arrival];
    this.#root.className = "popover";
    this.#root.popover = "auto";
    this.#root.setAttribute("role", "dialog");
    this.#note.className = "note";
    this.#note.setAttribute("role", "status");
    put(parent, this.#root);
    this.#root.addEventListener("click", (event) => this.#clicked(event));
    this.#root.addEventListener("keydown", (event) => this.#pressed(event));
    this.#root.addEventListener("beforetoggle", ({ newState }) => newState === "closed" && this.#closed());
    addEventListener("scroll", () => this.#place(), { capture: true, passive: true });
    addEventListener("resize", () => this.#place());
  }

  get isOpen() {
    return this.#anchor !== null;
  }

  /** Opens next to `anchor`, the element of this unit. */
  open({ tokens }, text, anchor) {
    const [token] = tokens;
    this.#top = token.top ?? [];
    const top = this.#top.slice(0, MOST);
    const own = top.some(({ id }) => id === token.id) || !top.length ? [] : [token];
    this.#alternatives = [...top, ...own].map((one) => new Alternative(one, one.id === token.id));
    const full = Math.max(...this.#alternatives.map((one) => probability(one.token)));
    for (const one of this.#alternatives) one.show({ model: probability(one.token), full });
    const list = put(element("ol"), ...this.#alternatives.map((one) => element("li", one.element)));
    list.className = "alternatives";
    this.#note.textContent = remark(tokens);
    this.#root.replaceChildren(heading(tokens, text), figures(token, this.#arrival(token)), ...(top.length ? [list] : []), this.#note);
    this.#root.setAttribute("aria-label", `Alternatives to ${text.trim() ? `'${text.trim()}'` : "a blank"}`);
    this.#anchor = anchor;
    this.#root.showPopover();
    this.#place();
    const chosen = this.#alternatives.find((one) => one.token.id === token.id);
    this.#root.tabIndex = -1;
    (chosen?.element ?? this.#root).focus({ preventScroll: true });
  }

  close() {
    if (this.isOpen) this.#root.hidePopover();
  }

  /** Moves to another element of the same token, after the text was redrawn. */
  move(anchor) {
    if (this.isOpen) this.#anchor = anchor;
    this.#place();
  }

  #closed() {
    const anchor = this.#anchor;
    this.#anchor = null;
    if (this.#root.contains(document.activeElement)) anchor?.focus({ preventScroll: true });
  }

  #clicked({ target }) {
    const button = target.closest("button");
    const taken = this.#alternatives.find((one) => one.element === button)?.token;
    if (!taken) return;
    this.#note.textContent = obstacle(taken);
    if (obstacle(taken)) return;
    this.close();
    this.#onpick({ ...taken, top: this.#top });
  }

  #pressed(event) {
    if (event.key === "Escape") {
      event.preventDefault();
      event.stopPropagation(); // the page's own Escape stops the run
      this.close();
    } else if (this.#alternatives.length) {
      walk(event, this.#alternatives.map((one) => one.element));
    }
  }

  // Below the token, or above it if there is no room below; always inside the window.
  #place() {
    if (!this.isOpen) return;
    const { left, top, bottom } = this.#anchor.getClientRects()[0] ?? this.#anchor.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.#root;
    const isBelow = bottom + GAP + height <= innerHeight || top - GAP - height < 0;
    const y = isBelow ? Math.min(bottom + GAP, innerHeight - height - GAP) : top - GAP - height;
    this.#root.style.left = `${Math.max(Math.min(left, innerWidth - width - GAP), GAP)}px`;
    this.#root.style.top = `${Math.max(y, GAP)}px`;
  }
}

function heading(tokens, text) {
  const share = tokens.reduce((product, one) => product * (probability(one) ?? 1), 1);
  const name = tokens.length > 1 ? element("span", text) : label(tokens[0]);
  const ids = element("small", `id ${tokens.map(({ id }) => id).join(", ")}`);
  const line = element("p", name, ids, element("strong", tokens[0].logprob === null ? "" : percent(share)));
  line.className = "heading";
  return line;
}

function figures(token, ms) {
  const top = token.top ?? [];
  const known = token.logprob !== null;
  const pairs = [
    ...(known && top.length ? [["rank", rank(token) ?? `beyond ${top.length}`]] : []),
    ...(known ? [["surprise", bits(surprise(token))]] : []),
    ...(known && top.length ? [["entropy", `\u2265 ${bits(entropy(top))}`]] : []),
    ...(ms === undefined ? [] : [["after", `${Math.round(ms)}\u00a0ms`]]),
  ];
  return put(element("dl"), ...pairs.map(([name, value]) => element("div", element("dt", name), element("dd", value))));
}

function remark([first, ...others]) {
  if (first.logprob === null) return "The first token that the model reads: nothing stands before it to expect it from.";
  if (others.length) return `One character of ${others.length + 1} tokens. Rank, bits and alternatives are of the first.`;
  return first.top?.length ? "" : "The alternatives of this place were not asked for.";
}
