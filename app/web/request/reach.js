// What happens to a text that is longer than the model's context: the server refuses it, until the user agrees, for this
// text or for every one, that the model reads its end only. Both are stored with the document.

const ALIKE = 200; // characters at the beginning by which a text is known again

export class Reach {
  #agreed; // the beginning of the text for which the user agreed, or null

  /** Whether the user agreed for every text. */
  always;

  /** `stored` is what `data` gave before, or anything else on a first visit. */
  constructor(stored) {
    this.#agreed = typeof stored?.agreed === "string" ? stored.agreed : null;
    this.always = stored?.always === true;
  }

  get data() {
    return { agreed: this.#agreed, always: this.always };
  }

  agree(text) {
    this.#agreed = text.slice(0, ALIKE);
  }

  /** Whether the beginning of this text may be left out. */
  covers(text) {
    return this.always || (this.#agreed !== null && text.startsWith(this.#agreed));
  }

  /** The request fields for a text, of which the model reads at most `budget` tokens. */
  fields(text, budget) {
    return this.covers(text) && budget > 0 ? { truncate_prompt_tokens: String(budget) } : {};
  }
}
