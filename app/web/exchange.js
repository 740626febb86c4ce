// Import and export: the request as a program, the text as a link, a run's receipt and its replay. main.js creates it,
// and notifies it when the document changes.

import { element, put } from "./elements.js";
import { requestFields } from "./request/request-body.js";
import { copy, REFUSED } from "./request/clipboard.js";
import { authorization, complete } from "./request/completion.js";
import { Menu } from "./request/menu.js";
import { digest, replay, taken, typedOf } from "./request/receipt-facts.js";
import { Receipt } from "./request/receipt.js";
import { decode, encode, isShared } from "./request/share-link.js";
import { LANGUAGES, snippet } from "./request/snippets.js";

const SHOWN = 2500; // ms for which "Copied" is shown

export class Exchange {
  #notebook;
  #panel;
  #truncation;
  #failed;
  #exits;
  #receipt;
  #replaying = null; // the AbortController of the running replay

  /** The model's entry in GET /v1/models. */
  modelFacts = {};

  /**
   * `elements`: { exits, receipt }; `failed(message)` reports a link that cannot be opened.
   */
  constructor({ notebook, panel, truncation, elements, failed }) {
    [this.#notebook, this.#panel, this.#truncation, this.#failed] = [notebook, panel, truncation, failed];
    this.#exits = new Exits(elements.exits, { program: (language) => this.#program(language), link: () => this.#link() });
    this.#receipt = new Receipt(elements.receipt, {
      replay: () => this.#replay(),
      stop: () => this.#replaying.abort(),
      take: (receipt) => this.#take(receipt),
    });
    addEventListener("hashchange", () => this.open());
    this.open();
  }

  /** The sheet's content has changed. */
  show() {
    this.#receipt.show(this.#notebook.tree.lastRun?.facts.receipt ?? null);
  }

  /** Opens the link in the address bar, if there is one. One undo brings back the previous text. */
  async open() {
    const { hash, pathname, search } = location;
    if (!isShared(hash)) return;
    if (this.#notebook.running) return this.#exits.tell("The link is opened when the run has ended.");
    history.replaceState(null, "", pathname + search);
    try {
      const { text, typed } = await decode(hash);
      if (this.#notebook.running) throw new Error("A run began while the link was being read: open it again.");
      this.#panel.reset();
      this.#panel.fill(typed);
      this.#notebook.open(text);
      this.#exits.tell("Opened from a link. Undo brings back the text that was here.");
    } catch (error) {
      this.#failed(error.message);
    }
  }

  #program(language) {
    const { text } = this.#notebook;
    const typed = { ...this.#truncation.fields(text), ...this.#panel.typed };
    const fields = requestFields(text, typed, this.#panel.parameters);
    const url = new URL("complete", document.baseURI).href;
    return snippet(language, { url, fields, keyed: "Authorization" in authorization() });
  }

  async #link() {
    return new URL(await encode({ text: this.#notebook.text, typed: this.#panel.typed }), location.href).href;
  }

  async #replay() {
    const { state, facts } = this.#notebook.tree.lastRun;
    const { parameters } = this.#panel;
    const { at, span, typed, dropped = "" } = facts;
    const suffix = span?.isInfill ? { suffix: state.text.slice(span.until) } : {};
    const run = { ...facts, typed: { ...typed, ...suffix }, prompt: state.text.slice(0, at), text: dropped + state.text.slice(at, span?.until) };
    const send = (prompt, typed, signal) => complete(prompt, typed, signal, parameters, facts.origin);
    this.#replaying = new AbortController();
    const { sentence } = await replay(run, { complete: send, parameters, signal: this.#replaying.signal });
    return sentence;
  }

  async #take(receipt) {
    this.#panel.reset();
    this.#panel.fill(typedOf(receipt, this.#panel.parameters));
    return taken(receipt, { ...this.modelFacts, prompt_sha256: await digest(this.#notebook.text) });
  }
}

// Copies the current request as a program, or the text and its settings as a link, to the clipboard.
class Exits {
  #outcome = element("p");
  #timer = 0;

  /** `program(language)` and `link()` return the text to copy, or a promise of it; the message of an Error is shown. */
  constructor(root, { program, link }) {
    const button = element("button", "Copy link");
    button.type = "button";
    button.addEventListener("click", () => this.#copy(link, "Copied the link: it holds the text and the settings."));
    const name = (language) => `Copied the request as ${LANGUAGES[language]}.`;
    const onpick = (language) => this.#copy(() => program(language), name(language));
    const row = element("div");
    row.className = "exits";
    new Menu(row, { label: "Copy as", items: LANGUAGES, onpick });
    this.#outcome.setAttribute("role", "status");
    this.#outcome.className = "outcome";
    put(root, put(row, button), this.#outcome);
  }

  /** Shows a sentence about a link or a program. */
  tell(sentence, { lasting = true } = {}) {
    clearTimeout(this.#timer);
    this.#outcome.textContent = sentence;
    if (!lasting) this.#timer = setTimeout(() => (this.#outcome.textContent = ""), SHOWN);
  }

  async #copy(text, sentence) {
    try {
      const done = await copy(await text());
      this.tell(done ? sentence : REFUSED, { lasting: !done });
    } catch (error) {
      this.tell(error.message);
    }
  }
}
