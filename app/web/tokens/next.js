// The next token after a text that is being written: asked for when the hand rests, one question at a time, and none
// twice. `ask(text, signal)` resolves to the server's token, or null at the end of the context; `onanswer(token)` and
// `onerror(error)` receive the result.

const REST = 300; // ms without a key

export class NextToken {
  #ask;
  #onanswer;
  #onerror;
  #timer = 0;
  #request = null; // the AbortController of the question that is out
  #wanted = null; // the text that was asked for last, or is waited for

  constructor(ask, { onanswer, onerror }) {
    [this.#ask, this.#onanswer, this.#onerror] = [ask, onanswer, onerror];
  }

  /** From now on only what follows this text is of interest. */
  want(text) {
    if (text === this.#wanted) return;
    this.stop();
    this.#wanted = text;
    this.#timer = setTimeout(() => this.#send(text), REST);
  }

  /** Nothing is, for now. */
  stop() {
    clearTimeout(this.#timer);
    this.#request?.abort();
    [this.#request, this.#wanted] = [null, null];
  }

  async #send(text) {
    const request = (this.#request = new AbortController());
    try {
      const token = await this.#ask(text, request.signal);
      if (this.#request === request) this.#onanswer(token);
    } catch (error) {
      if (this.#request !== request) return; // superseded by a newer request
      this.#wanted = null; // the same text may be asked for again
      this.#onerror(error);
    }
  }
}
