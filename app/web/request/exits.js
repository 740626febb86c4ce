// Copies the current request as a program, or the text and its settings as a link, to the clipboard.

import { element, put } from "../elements.js";
import { copy, REFUSED } from "./clipboard.js";
import { Menu } from "./menu.js";
import { LANGUAGES } from "./snippets.js";

const SHOWN = 2500; // ms that "Copied" stays

export class Exits {
  #told = element("p");
  #timer = 0;

  /** `program(language)` and `link()` give the text to be copied, or a promise of it; an Error's message is told. */
  constructor(root, { program, link }) {
    const button = element("button", "Copy link");
    button.type = "button";
    button.addEventListener("click", () => this.#copy(link, "Copied the link: it holds the text and the settings."));
    const name = (language) => `Copied the request as ${LANGUAGES[language]}.`;
    const onpick = (language) => this.#copy(() => program(language), name(language));
    const row = element("div");
    row.className = "exits";
    new Menu(row, { label: "Copy as", items: LANGUAGES, onpick });
    this.#told.setAttribute("role", "status");
    this.#told.className = "told";
    put(root, put(row, button), this.#told);
  }

  /** Says something about a link or a program. */
  tell(sentence, { lasting = true } = {}) {
    clearTimeout(this.#timer);
    this.#told.textContent = sentence;
    if (!lasting) this.#timer = setTimeout(() => (this.#told.textContent = ""), SHOWN);
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
