// Texts that are longer than the model's context: the server refuses them until the user agrees, for this text or for all,
// that the model reads only the end. The agreement is stored with the document.

const PREFIX = 200; // characters at the beginning that identify a text

export class Truncation {
  #elements;
  #page;
  #agreed; // the beginning of the text for which the user agreed, or null
  #isAlways; // the user agreed for every text

  /**
   * `elements`: { status (status.js), label, checkbox }. `page`: { text(), context() in tokens, maxTokens() of a run,
   * onagree() the user agreed for this text, onchange() for all texts, or no longer }. `stored`: an earlier value of
   * `data`; anything else counts as a first visit.
   */
  constructor(elements, page, stored) {
    [this.#elements, this.#page] = [elements, page];
    this.restore(stored);
    elements.checkbox.addEventListener("change", ({ target }) => {
      this.#isAlways = target.checked;
      page.onchange();
    });
  }

  /** Restores the agreement of another document. */
  restore(stored) {
    this.#agreed = typeof stored?.agreed === "string" ? stored.agreed : null;
    this.#isAlways = stored?.always === true;
  }

  get data() {
    return { agreed: this.#agreed, always: this.#isAlways };
  }

  /** Whether the user agreed that the model does not read the beginning of this text. */
  covers(text) {
    return this.#isAlways || (this.#agreed !== null && text.startsWith(this.#agreed));
  }

  /** The request field that truncates this prompt, if the user agreed to that. */
  fields(prompt) {
    const budget = this.#budget;
    return this.covers(prompt) && budget > 0 ? { truncate_prompt_tokens: String(budget) } : {};
  }

  /** Offers to continue from the end of the text, once for this text or always. */
  offer() {
    this.#show(true);
    this.#elements.status.offer(`Go on from the end of it: its last ${this.#budget} tokens`, () => {
      this.#agreed = this.#page.text().slice(0, PREFIX);
      this.#page.onagree();
    });
  }

  withdraw() {
    this.#show(this.#isAlways);
    this.#elements.status.withdraw();
  }

  #show(isShown) {
    this.#elements.label.hidden = !isShown;
    this.#elements.checkbox.checked = this.#isAlways;
  }

  // Context tokens left for the prompt, at least half of the context.
  get #budget() {
    const context = this.#page.context();
    return Math.max(context - this.#page.maxTokens(), Math.ceil(context / 2));
  }
}
