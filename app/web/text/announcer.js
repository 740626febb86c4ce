// Screen reader announcements besides the status line: whole sentences of streamed text, and short messages. At most one
// a second, since more would interrupt each other. `region` is a visually hidden element with aria-live="polite".

import { Sentences } from "./sentences.js";

const PAUSE = 1000; // ms

export class Announcer {
  #region;
  #sentences = new Sentences();
  #waiting = [];
  #timer = null;

  /** While true, only messages are spoken, because another view presents the text. */
  muted = false;

  constructor(region) {
    this.#region = region;
  }

  /** Speaks a message, such as "3 continuations". */
  say(message) {
    this.#waiting.push(message);
    if (this.#timer === null) this.#speak();
  }

  /** Takes streamed text, and speaks each sentence once it is complete. */
  stream(text) {
    for (const sentence of this.#sentences.feed(text)) if (!this.muted) this.say(sentence);
  }

  /** The run has ended: speaks the rest. */
  end() {
    for (const rest of this.#sentences.flush()) if (!this.muted) this.say(rest);
  }

  #speak() {
    this.#region.textContent = this.#waiting.join(" ");
    this.#waiting = [];
    this.#timer = setTimeout(() => {
      this.#timer = null;
      if (this.#waiting.length) this.#speak();
    }, PAUSE);
  }
}
