// Screen reader announcements, besides the status line: whole sentences of the text as it streams, and short messages.
// At most one announcement per second, since more would cut each other off. `region` is a visually hidden element with
// aria-live="polite".

import { Sentences } from "./sentences.js";

const PAUSE = 1000; // ms

export class Announcer {
  #region;
  #sentences = new Sentences();
  #waiting = [];
  #timer = null;

  /** While true, streamed text is not spoken: another view says what there is. Messages are. */
  muted = false;

  constructor(region) {
    this.#region = region;
  }

  /** A message, such as "3 continuations". */
  say(message) {
    this.#waiting.push(message);
    if (this.#timer === null) this.#speak();
  }

  /** Generated text, as it comes: spoken once a sentence is whole. */
  stream(text) {
    for (const sentence of this.#sentences.feed(text)) if (!this.muted) this.say(sentence);
  }

  /** The run is over: the rest is spoken, whole or not. */
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
