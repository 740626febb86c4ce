// Stores the tree of texts and the settings across reloads, under one key: a moment after the last change, and at once
// when the page closes. sessionStorage keeps the text of this tab, which no other tab may take; localStorage the text
// for the next visit, where the last write wins.

const KEY = "inkstream.notebook";
const DELAY = 400; // ms
const STORAGES = [() => sessionStorage, () => localStorage]; // a browser may refuse them by an exception
const WARNINGS = [
  "", // all of it is stored
  "The browser's storage is full: it keeps the text, not its history.",
  "The browser stores nothing here: copy the text before you close the page.",
];

export class Autosave {
  #page; // what begin() got
  #written = null; // JSON
  #timer = 0;
  #isWaiting = false;
  #level = 0; // index of the last message in WARNINGS that the user has seen

  /** What was stored, or null on a first visit. */
  load() {
    try {
      this.#written = sessionStorage.getItem(KEY) ?? localStorage.getItem(KEY);
      return JSON.parse(this.#written);
    } catch {
      // Storage is switched off, or contains what another page wrote: treat it as a first visit.
      return null;
    }
  }

  /**
   * `page`: { states() what to store, the fullest first, and a shorter one for where the storage is too small; isRunning()
   * whether a run, whose output so far is in the states, ends with the page; warn(sentence) }.
   */
  begin(page) {
    this.#page = page;
    const hidden = () => {
      this.#isWaiting ||= page.isRunning();
      this.#flush();
    };
    document.addEventListener("visibilitychange", hidden); // the last event that a phone sends to a page
    addEventListener("pagehide", hidden);
  }

  later() {
    this.#isWaiting = true;
    clearTimeout(this.#timer);
    this.#timer = setTimeout(() => this.#flush(), DELAY);
  }

  #flush() {
    clearTimeout(this.#timer);
    if (!this.#isWaiting) return;
    this.#isWaiting = false;
    const texts = this.#page.states().map((state) => JSON.stringify(state));
    // An idle tab that is closed must not write its old text over what another tab has saved since.
    if (texts[0] === this.#written) return;
    const kept = STORAGES.map((storage) => texts.findIndex((text) => put(storage, text)));
    [this.#written] = texts;
    this.#report(Math.max(...kept.map((index) => (index < 0 ? texts.length : index))));
  }

  // Shows a warning once, and again where it got worse, but never over a run's status.
  #report(level) {
    if (this.#page.isRunning()) return;
    if (level > this.#level) this.#page.warn(WARNINGS[level]);
    this.#level = level;
  }
}

function put(storage, text) {
  try {
    storage().setItem(KEY, text);
    return true;
  } catch {
    return false; // switched off or full: the page works, and says that it forgets
  }
}
